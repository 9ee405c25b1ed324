"""Immutable files of checkpoints and datasets, named after a checksum of their content that is verified on reading."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from isqn.types import UserError

Description = dict[str, Any]

ALWAYS_ALLOWED_BYTES = 2**28
MAX_RATIO = 32
LOCK = ".lock"  # in the folder that it locks
UNFINISHED = ".writing"  # end of the name of a text file that is not yet complete


class DamagedFile(Exception):
    """Raised if a file of a checkpoint or dataset is missing, or differs from what was written."""


class WriteError(UserError):
    """Raised if a file cannot be written: a full disk, a limit, a missing permission."""

    def __init__(self, path: Path, reason: str, advice: str = "") -> None:
        super().__init__(f"{path} cannot be written ({reason}){'; ' * bool(advice)}{advice}.")
        self.path, self.reason = path, reason


@contextmanager
def writing(path: Path, advice: str = "") -> Iterator[None]:
    """Turn errors of the file system into a `WriteError` that names the path, the reason and what may help."""
    try:
        yield
    except OSError as error:
        raise WriteError(path, error.strerror or str(error), advice) from error
    except WriteError as error:
        if not advice:
            raise
        raise WriteError(path, error.reason, advice) from error


class Busy(UserError):
    """Raised if another process works in a folder."""


@contextmanager
def lock_folder(folder: Path, advice: str) -> Iterator[None]:
    """Lock a folder for this process, and create it if needed. The lock ends with the process, however that ends.

    Afterwards the file of the lock is deleted, and so is a folder that was created and is still empty.
    """
    path, is_new = folder / LOCK, not folder.exists()
    with writing(folder, advice):
        folder.mkdir(parents=True, exist_ok=True)
        # Open for writing, because network file systems lock no other files.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(handle, path)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
                if is_new:
                    folder.rmdir()  # fails unless it is empty
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"{path.parent} is in use by another process.") from None
    except OSError as error:
        warnings.warn(f"{path.parent} cannot be locked ({error.strerror}): use it only once at a time.", stacklevel=5)
    if not path.exists() or not os.path.samestat(os.fstat(handle), path.stat()):  # deleted since it was opened
        raise Busy(f"{path.parent} is in use by another process.")


def write_file(folder: Path, stem: str, content: bytes) -> Description:
    """Write a file atomically and return its description: name, bytes and SHA-256.

    The name contains the checksum, so a file of an older checkpoint is never overwritten, even if a run is resumed from
    that checkpoint and then differs.
    """
    checksum = sha256(content).hexdigest()
    path = folder / f"{stem}-{checksum[:16]}.safetensors"
    if not path.exists():
        _replace(path, path.with_suffix(".unfinished"), content)
    return {"name": path.name, "bytes": len(content), "sha256": checksum}


def path_in(folder: Path, name: Any) -> Path:
    """Return the path of a file that a description names; one outside of the folder raises `DamagedFile`."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or Path(name).name != name:
        raise DamagedFile(f"{folder} describes a file named {name!r}, which is not a name in this folder.")
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise DamagedFile(f"{path} is a link to {path.resolve()}, which lies outside of this folder.")
    return path


def check_files(description: Any, folder: Path) -> list[Description]:
    """Return the descriptions of the files of a folder; raises `DamagedFile` if they are not what `write_file` returns.

    Someone may have written them who made the checksums right.
    """
    files = description.get("files") if isinstance(description, dict) else None
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise DamagedFile(f"{folder} has no list of files in its description.")
    for file in files:
        for name, kind in (("name", str), ("bytes", int), ("sha256", str)):
            if type(file.get(name)) is not kind:
                raise DamagedFile(f"{folder} describes a file whose {name} is {file.get(name)!r:.40}.")
    return files


def read_file(folder: Path, file: Description) -> bytes:
    """Read a file and verify its size and checksum; raises `DamagedFile`."""
    path = path_in(folder, file["name"])
    if not path.is_file():
        raise DamagedFile(f"{path} is missing.")
    if path.stat().st_size != file["bytes"]:  # before it is read
        raise DamagedFile(f"{path} is not what was written: its checksum differs.")
    content = path.read_bytes()
    if len(content) != file["bytes"] or sha256(content).hexdigest() != file["sha256"]:
        raise DamagedFile(f"{path} is not what was written: its checksum differs.")
    return content


def check_claim(path: Path, name: str, claimed: int, stored: int, ratio: int = MAX_RATIO) -> None:
    """Refuse an array that claims much more memory than it takes in the file, before it is allocated."""
    if claimed > max(ALWAYS_ALLOWED_BYTES, ratio * stored):
        raise UserError(
            f"{path}: {name} claims {claimed:,} bytes, of which {stored:,} are stored; more than {ratio:,} times "
            "as much is refused as damaged."
        )


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically: after a crash it holds the old text or the new text."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it holds the old content or the new content."""
    _replace(path, path.with_name(f".{path.name}{UNFINISHED}"), content)


def _replace(path: Path, unfinished: Path, content: bytes) -> None:
    """Write a file under another name, flush it to disk and rename it; if this fails, leave nothing behind."""
    with writing(path):
        try:
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def files_needed(description: Description) -> list[str]:
    """List the names of the files of a description, relative to its folder."""
    return [file["name"] for file in description["files"]]
