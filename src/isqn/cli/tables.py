"""Tables as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; with a header, all columns but the first are right-aligned."""
    lines = [header, *rows] if header else rows
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [
            cell.rjust(width) if header and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
