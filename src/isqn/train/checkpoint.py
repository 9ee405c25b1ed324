"""Checkpoints: arrays as safetensors, everything else as JSON, with checksums of both. They hold no code.

A checkpoint is a folder `checkpoints/STEP`. It is filled under another name and then renamed, so that it is either
complete or absent. The last two are kept. They share the files of the replay buffer and of a recorded dataset, which
lie beside them: a checkpoint names the files that it needs, and files that no checkpoint names are deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from isqn.data.files import DamagedFile, check_files, files_needed, sync, writing
from isqn.data.text import DamagedText, read_json
from isqn.lazy import jax
from isqn.types import UserError

FORMAT = 1
NUM_KEPT = 2
SHARED_FOLDERS = ("replay", "dataset")  # beside the checkpoints, which name the files in them


def flatten(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves of a tree by readable names, such as "agent.params.heads.kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def unflatten(template: Any, arrays: dict[str, np.ndarray], where: Path) -> Any:
    """Return the tree of `template` filled from `arrays`; refuse other names, shapes or types."""
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    names = [_name(path) for path, _ in paths]
    if unmatched := sorted(set(names) ^ set(arrays)):
        raise UserError(f"{where} does not fit this configuration: {', '.join(unmatched[:5])} is in only one of them.")
    for name, (_, leaf) in zip(names, paths, strict=True):
        if arrays[name].shape != leaf.shape or arrays[name].dtype != leaf.dtype:
            raise UserError(
                f"{where} does not fit this configuration: {name} is {arrays[name].dtype}{list(arrays[name].shape)} "
                f"there and {leaf.dtype}{list(leaf.shape)} here."
            )
    return jax.tree.unflatten(structure, [arrays[name] for name in names])


def _name(path: Any) -> str:
    return ".".join(str(getattr(part, "name", getattr(part, "key", getattr(part, "idx", part)))) for part in path)


def write(folder: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
    """Write a checkpoint, so that after a crash the folder is either complete or absent."""
    temporary = folder.with_name(".writing")  # a crash may leave it behind; the next write removes it
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(folder):
        try:
            temporary.mkdir(parents=True)
            _save(arrays, temporary / "state.safetensors")
            manifest = {"format": FORMAT, "state_sha256": _digest(temporary / "state.safetensors"), **manifest}
            text = json.dumps({"manifest_sha256": _manifest_digest(manifest), **manifest}, indent=1)
            (temporary / "manifest.json").write_text(text + "\n")
            for path in (*temporary.iterdir(), temporary):
                sync(path)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)  # it may hold what is left of a full disk
            raise
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        sync(folder.parent)


def _save(arrays: dict[str, np.ndarray], path: Path) -> None:
    try:
        save_file(arrays, path)
    except SafetensorError as error:  # its text ends with "(os error 28)"
        found = re.search(r"os error (\d+)", str(error))
        reason = (int(found[1]), os.strerror(int(found[1]))) if found else (str(error),)
        raise OSError(*reason) from error


def read(folder: Path) -> tuple[dict[str, np.ndarray], Manifest]:
    """Return the arrays and the manifest of a checkpoint; raise `DamagedFile` if it is not as it was written."""
    try:
        manifest = read_manifest(folder)
        if manifest["format"] != FORMAT:
            raise UserError(f"{folder} has checkpoint format {manifest['format']}; this version reads format {FORMAT}.")
        if _digest(folder / "state.safetensors") != manifest["state_sha256"]:
            raise DamagedFile(f"{folder / 'state.safetensors'} does not match its checksum")
        return load_file(folder / "state.safetensors"), manifest
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedFile(f"{folder} cannot be read: {error}") from error


def steps(*run_dirs: Path) -> list[int]:
    """Return the steps at which all of the runs have a checkpoint, newest first."""
    return sorted(set.intersection(*(set(_steps(run_dir)) for run_dir in run_dirs)), reverse=True)


def _steps(run_dir: Path) -> list[int]:
    try:
        names = os.listdir(run_dir / "checkpoints")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(name) for name in names if name.isdecimal() and name.isascii()]


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"{step:012d}"


def tidy(run_dir: Path) -> None:
    """Delete all but the last two checkpoints and the files that they name."""
    for step in steps(run_dir)[NUM_KEPT:]:
        shutil.rmtree(folder_of(run_dir, step))
    try:
        manifests = [read_manifest(folder_of(run_dir, step)) for step in steps(run_dir)]
    except DamagedFile:
        return  # it may name files that a person still wants to rescue
    for name in SHARED_FOLDERS:
        descriptions = [manifest[name] for manifest in manifests if name in manifest]
        needed = {file for description in descriptions for file in files_needed(description)}
        for path in (run_dir / name).glob("*-*") if descriptions else ():  # otherwise the folder is not the run's
            if path.name not in needed:
                path.unlink()


class Manifest(dict[str, Any]):
    """Fields of a checkpoint; a missing one raises `DamagedFile`."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise DamagedFile(f"{self._path} has no {name}.")


FIELDS = {"state_sha256": str, "config": dict, "counters": dict, "tables": dict, "step": int, "spec": dict}
FIELDS |= dict.fromkeys(SHARED_FOLDERS, dict)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, with fields of the right types; raises `DamagedFile`."""
    path = folder / "manifest.json"
    try:
        fields = read_json(path)
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    except DamagedText as error:
        raise DamagedFile(str(error)) from error
    if not isinstance(fields, dict) or fields.pop("manifest_sha256", "") != _manifest_digest(fields):
        raise DamagedFile(f"{path} does not match its checksum")
    for name, kind in FIELDS.items():
        if not isinstance(fields.get(name, kind()), kind):
            raise DamagedFile(f"{path} is damaged: {name} is {fields[name]!r:.40}.")
    for name in SHARED_FOLDERS:
        check_files(fields.get(name, {"files": []}), path)
    for name, length in fields.get("tables", {}).items():
        if not name.isidentifier() or type(length) is not int or length < 0:
            raise DamagedFile(f"{path} is damaged: the length of the table {name!r:.40} is {length!r:.40}.")
    return Manifest(path, fields)


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def newest_good(run_dir: Path) -> Iterator[tuple[int, dict[str, np.ndarray], dict[str, Any]]]:
    """Yield the step, arrays and manifest of each checkpoint, newest first; skip damaged ones with a warning."""
    for step in steps(run_dir):
        try:
            yield step, *read(folder_of(run_dir, step))
        except DamagedFile as error:
            warn_damaged(error)


def warn_damaged(error: DamagedFile) -> None:
    warnings.warn(f"a damaged checkpoint is skipped: {error}", stacklevel=3)


def drop_after(run_dir: Path, step: int) -> None:
    """Delete the checkpoints and best agents after a step, because the run that resumes there makes them again."""
    for later in steps(run_dir):
        if later > step:
            shutil.rmtree(folder_of(run_dir, later))
    for best in run_dir.glob("best-*"):
        number = best.name.removeprefix("best-")
        if number.isdecimal() and int(number) > step:
            shutil.rmtree(best)
    tidy(run_dir)  # otherwise a damaged file could be taken for the one that the resumed run writes again


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
