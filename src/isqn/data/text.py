"""Text files that a crash or an editor may have damaged: errors name the file and the line."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from isqn.types import UserError

Row = dict[str, str]
WHOLE_NUMBERS = ("epoch", "episode", "step")  # columns of the tables of a run
WHOLE_NUMBER = re.compile(r"\d{1,15}", re.ASCII)


class DamagedText(UserError):
    """Raised if a text file is not as this package writes it."""

    @classmethod
    def at(cls, path: Path, line: int, reason: str) -> DamagedText:
        """Return the error for a line of a file."""
        return cls(f"{path}, line {line}, is damaged: {reason}.")


def read_text(path: Path, length: int | None = None) -> str:
    """Return the content, or the first bytes, of a UTF-8 file; a byte order mark at its start is dropped."""
    with path.open("rb") as file:
        content = file.read(-1 if length is None else length)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"byte {content[error.start]:#04x} is not UTF-8"
        raise DamagedText.at(path, content.count(b"\n", 0, error.start) + 1, reason) from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DamagedText.at(path, error.lineno, f"it is not JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits; lists nested too deeply
        raise DamagedText.at(path, 1, f"it is not JSON ({error})") from None


def read_table(path: Path, length: int | None = None, needs: Collection[str] = ()) -> list[Row]:
    """Return the rows of a CSV file of numbers, without an incomplete last line, or those of its first bytes.

    Each row must have a number or nothing in each column; epochs, episodes and steps are whole numbers, and returns are
    finite. `needs` are columns that a table with a header must have. Rows are numbered by the column `episode`, from 0,
    or have increasing steps, so that a line that is missing or repeated is found too.
    """
    text = read_text(path, length)
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]), strict=True)
    rows: list[Row] = []
    try:
        columns = next(reader, [])
        if len(set(columns)) < len(columns):
            raise DamagedText.at(path, 1, "two columns have the same name")
        for cells in reader:
            if len(cells) != len(columns):
                raise DamagedText.at(path, reader.line_num, f"it has {len(cells)} cells, and the header {len(columns)}")
            row = dict(zip(columns, cells, strict=True))
            for name, cell in row.items():
                if reason := _wrong_cell(name, cell):
                    raise DamagedText.at(path, reader.line_num, f"{name} is {cell!r:.40}, which is not {reason}")
            if reason := _disorder(row, rows):
                raise DamagedText.at(path, reader.line_num, reason)
            rows.append(row)
    except csv.Error as error:
        raise DamagedText.at(path, reader.line_num, f"it is not CSV ({error})") from None
    if length is not None and text and not text.endswith("\n"):
        raise DamagedText.at(path, text.count("\n") + 1, "a row of the checkpoint ends in the middle of it")
    if missing := [name for name in needs if columns and name not in columns]:
        raise DamagedText.at(path, 1, f"it has no column {' and '.join(missing)}")
    return rows


def _wrong_cell(column: str, cell: str) -> str:
    """Return what a cell should be and is not; "" if it is right."""
    try:
        number = float(cell or "nan")
    except ValueError:
        return "a number"
    if column in WHOLE_NUMBERS:
        return "" if WHOLE_NUMBER.fullmatch(cell) else "a whole number"
    return "a finite number" if column == "return" and not math.isfinite(number) else ""


def _disorder(row: Row, before: list[Row]) -> str:
    """Return why a row cannot follow the rows before it; "" if it can."""
    if "episode" in row:
        expected = str(len(before))
        return "" if row["episode"] == expected else f"episode is {row['episode']!r}, and should be {expected}"
    if "step" in row:
        step, last = int(row["step"]), int(before[-1]["step"]) if before else -1
        return "" if step > last else f"step is '{step}' after '{last}'"
    return ""
