"""Files of checkpoints and datasets that never change once written: named after their content, checked when read."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

Description = dict[str, Any]


class DamagedFile(Exception):
    """A file of a checkpoint is missing or is not what was written."""


def write_file(folder: Path, stem: str, content: bytes) -> Description:
    """Write aside, flush, rename. The name carries the checksum, so a file that an older checkpoint names is
    never written again, even if a run goes back and takes another way."""
    checksum = sha256(content).hexdigest()
    path = folder / f"{stem}-{checksum[:16]}.safetensors"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    return {"name": path.name, "bytes": len(content), "sha256": checksum}


def read_file(folder: Path, file: Description) -> bytes:
    path = folder / file["name"]
    if not path.exists():
        raise DamagedFile(f"{path} is missing.")
    content = path.read_bytes()
    if len(content) != file["bytes"] or sha256(content).hexdigest() != file["sha256"]:
        raise DamagedFile(f"{path} is not what was written: its checksum differs.")
    return content


def replace_text(path: Path, text: str) -> None:
    """The old text or the new one, whatever happens."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    os.replace(aside, path)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, safe from a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def files_needed(description: Description) -> list[str]:
    """Names, within its folder, of the files that a description refers to."""
    return [file["name"] for file in description["files"]]
