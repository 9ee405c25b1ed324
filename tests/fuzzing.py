"""Damage to files, and a child process that reads damaged files within limits of time and memory.

A test file gives `READERS` and calls `run_child` if it is started as a program. Its tests call `check`, which starts it
as a child. A crash or a limit that is exceeded ends the child; the parent reports the case, which its number
reproduces.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load, save

from isqn.types import UserError

CPU_SECONDS = 10  # of one case; processor time, so that a busy machine does not matter
ALLOWED_BYTES = 8_000_000  # of Python and numpy in one case; the files have less than 300 kB
ADDRESS_SPACE = 2**30  # more than the child has at its start, for libraries in C
MANY = 10_000  # cases of a test file in `make test-slow`
PARTS = 4  # tests that share the many cases

Damage = Callable[[Path, np.random.Generator], Path]


def allow(path: Path, message: str) -> None:
    """Accept every sentence."""


class Reader(NamedTuple):
    """A kind of file: how valid ones are written, read and damaged."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    damage: Damage  # damage one file of a folder, and return its path
    check: Callable[[Path, str], None] = allow  # check the sentence by which a damaged file is refused


# -- damage


def damage_bytes(content: bytes, rng: np.random.Generator) -> bytes:
    """Overwrite, insert, repeat or cut off bytes; small numbers and extreme ones are frequent."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        place, length = int(rng.integers(len(changed) + 1)), int(rng.choice([1, 1, 1, 2, 4, 8]))
        value = rng.choice([rng.bytes(length), b"\0" * length, b"\xff" * length, b"\x7f" + b"\xff" * (length - 1)])
        match rng.integers(16):
            case 0:
                changed[place:place] = value
            case 1:
                del changed[place : place + int(rng.integers(1, 40))]
            case 2:
                changed[place:place] = changed[place : place + int(rng.integers(1, 40))]
            case 3 if rng.random() < 0.3:
                del changed[place:]
            case _:
                changed[place : place + length] = value
    return bytes(changed)


JSON_VALUES = [None, -1, 0, 1, 2**31, 2**70, 1e308, float("nan"), "", "x", "../x", "/etc/passwd", [], {}, [[]], True]
JSON_VALUES += [0.5, -(2**70), float("inf"), 10**400, "\0", "é" * 9, [None], {"x": [1]}]


def damage_json(content: Any, rng: np.random.Generator) -> Any:
    """Replace or remove one value somewhere in nested lists and objects."""
    keys = [*content] if isinstance(content, dict) else [*range(len(content))] if isinstance(content, list) else []
    if not keys:
        return JSON_VALUES[rng.integers(len(JSON_VALUES))]
    key = keys[rng.integers(len(keys))]
    changed = content.copy()
    if isinstance(content[key], dict | list) and rng.random() < 0.8:
        changed[key] = damage_json(content[key], rng)
    elif rng.random() < 0.2:
        del changed[key]
    elif isinstance(content, list) and rng.random() < 0.2:
        changed.insert(key, content[key])
    else:
        changed[key] = JSON_VALUES[rng.integers(len(JSON_VALUES))]
    return changed


NOT_UTF8 = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80", b"\x80\x80"]
WORDS = ["", "x", "-1", "0", "1.5", "nan", "inf", "-inf", "1e308", "1e400", "99999999999999999999", "True", "true"]
WORDS += ["0x10", "1_0", " 1", "\0", "\ufeff", "é", '"', '"x"', "'x'", ",", "\n", "\r", "[]", "{}", "[1]", "[[tasks]]"]
WORDS += ["1979-05-27", "٣", "9" * 5_000, "[" * 50_000, '{"a":' * 20_000, "a." * 9_000 + "a = 1"]


def damage_text(content: bytes, rng: np.random.Generator) -> bytes:
    """Truncate a text, repeat, remove or exchange lines, replace a word, or insert what is not UTF-8."""
    lines = content.splitlines(keepends=True) or [b"\n"]
    first, second = (int(number) for number in rng.integers(len(lines), size=2))
    place = int(rng.integers(len(content) + 1))
    match rng.integers(10):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + NOT_UTF8[rng.integers(len(NOT_UTF8))] + content[place:]
        case 2:
            lines.insert(first, lines[first])
        case 3:
            del lines[first]
        case 4:
            lines[first], lines[second] = lines[second], lines[first]
        case 5:
            return damage_bytes(content, rng)
        case 6 if rng.random() < 0.5:
            return [content.decode().encode("utf-16"), b"\xef\xbb\xbf" + content, b""][rng.integers(3)]
        case _:
            words = [*re.finditer(rb'"[^"\n]*"|[\w.+-]+', lines[first])] or [re.match(b"", lines[first])]
            word = words[rng.integers(len(words))]
            assert word is not None
            new = WORDS[rng.integers(len(WORDS))].encode()
            lines[first] = lines[first][: word.start()] + new + lines[first][word.end() :]
    return b"".join(lines)


def damage_arrays(content: bytes, rng: np.random.Generator) -> bytes:
    """Damage the header or the data of safetensors, or exchange an array for another one."""
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.3:
        header = json.dumps(damage_json(json.loads(content[8 : 8 + length]), rng)).encode()
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    if rng.random() < 0.3:
        return content[: 8 + length] + damage_bytes(content[8 + length :], rng)
    if rng.random() < 0.2:
        return damage_bytes(content, rng)
    arrays = load(content)
    name = [*arrays][rng.integers(len(arrays))]
    array = arrays[name]
    extreme = np.full(array.shape, [0, 1, 2**70, -(2**70), np.nan, np.inf][rng.integers(6)], np.float64)
    with np.errstate(all="ignore"):
        others = [
            array.astype(["float64", "int8", "bool", "uint32", "float16"][rng.integers(5)]),
            array[: len(array) // 2] if array.ndim else array[None],
            np.concatenate([array, array]) if array.ndim else array[None],
            array.reshape(-1),
            array[..., None],
            array[:0] if array.ndim else array,
            np.array(1, array.dtype),
            extreme.astype(array.dtype),
        ]
    arrays[name] = np.ascontiguousarray(others[rng.integers(len(others))])
    if rng.random() < 0.1:
        del arrays[name]
    return save({("x" if rng.random() < 0.1 else key): value for key, value in arrays.items()})


def damage_content(path: Path, rng: np.random.Generator) -> bytes:
    """Damage a file by its kind."""
    content = path.read_bytes()
    if path.suffix == ".safetensors" and rng.random() < 0.9:
        return damage_arrays(content, rng)
    if path.suffix == ".json" and rng.random() < 0.6:
        return json.dumps(damage_json(json.loads(content), rng), indent=1).encode()
    if path.suffix in (".json", ".csv", ".toml", ".txt"):
        return damage_text(content, rng)
    return damage_bytes(content, rng)


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage_file(folder: Path, rng: np.random.Generator) -> Path:
    """Damage one file of a folder, and return its path."""
    paths = list_files(folder)
    path = paths[rng.integers(len(paths))]
    path.write_bytes(damage_content(path, rng))
    return path


def sign(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return JSON fields with their checksum, as someone would write who wants the damage to be read."""
    fields = {key: value for key, value in fields.items() if key != name}
    return {name: hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest(), **fields}


# -- the child


def run_cases(readers: dict[str, Reader], first: int, last: int) -> dict[str, Any]:
    """Read damaged files, printing the number of each case before it starts; return a table with a row per reader."""
    warnings.simplefilter("ignore")  # a damaged checkpoint is skipped with a warning
    rows: dict[str, Counter[str]] = {name: Counter() for name in readers}
    with tempfile.TemporaryDirectory() as box:
        for name, reader in readers.items():
            (Path(box) / name).mkdir()
            reader.write(Path(box) / name)
            shutil.copytree(Path(box) / name, Path(box) / "case")
            reader.read(Path(box) / "case")  # valid; also imports and compiles what the cases need
            shutil.rmtree(Path(box) / "case")
        if sys.platform == "linux":
            limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        tracemalloc.start()
        for number in range(first, last):
            name = [*readers][number % len(readers)]
            reader, row, folder = readers[name], rows[name], Path(box) / "case"
            shutil.copytree(Path(box) / name, folder)
            path = reader.damage(folder, np.random.default_rng(number))
            print(f"{number} {name}", flush=True)
            size = sum(path.stat().st_size for path in list_files(folder))
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            start, message = time.process_time(), ""
            try:
                reader.read(folder)
            except UserError as error:
                message = str(error)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            peak = tracemalloc.get_traced_memory()[1] - before
            row["milliseconds"] = max(row["milliseconds"], round(1e3 * (time.process_time() - start)))
            row["bytes"] = max(row["bytes"], peak - size)
            row["refused" if message else "read"] += 1
            assert peak < ALLOWED_BYTES + size, f"{peak:,} bytes were allocated"
            if message:
                reader.check(path, message)
            shutil.rmtree(folder)
    return rows


def run_child(readers: dict[str, Reader]) -> None:
    """Run the cases that the command line gives, and print their table as JSON."""
    first, last = map(int, sys.argv[1:])
    print(json.dumps(run_cases(readers, first, last)))


# -- the parent


def check(file: str, first: int, last: int) -> dict[str, Any]:
    """Run cases of a test file in a child process, and return their table."""
    child = subprocess.run([sys.executable, file, str(first), str(last)], capture_output=True, text=True, check=False)
    lines = child.stdout.splitlines() or ["before the first case"]
    assert child.returncode == 0, f"case {lines[-1]} ended with {child.returncode}:\n{child.stderr[-3_000:]}"
    return json.loads(lines[-1])


def check_all(readers: dict[str, Reader], file: str, first: int, count: int) -> None:
    """Run cases; every reader must refuse some."""
    rows = check(file, first, first + count)
    assert sum(row.get("read", 0) + row.get("refused", 0) for row in rows.values()) == count
    assert {name for name, row in rows.items() if row.get("refused")} == {*readers}
