"""Plain text tables: columns of limited width, numbers to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: The heading.
        width: Longer cells are shortened to this many characters.
        right: Whether cells are aligned to the right.
        keep: Which part of a long cell stays: ``"start"`` or ``"end"``.
    """

    title: str
    width: int = 40
    right: bool = False
    keep: str = "start"


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Returns the rows under their headings; a column without any content is left out."""
    cells = [[shorten(cell, column) for cell, column in zip(row, columns, strict=True)] for row in rows]
    shown = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    widths = {i: max(len(columns[i].title), *(len(row[i]) for row in cells)) for i in shown}
    rules = ["-" * widths.get(i, 0) for i in range(len(columns))]
    return "\n".join(_line(columns, row, widths) for row in ([c.title for c in columns], rules, *cells))


def shorten(text: str, column: Column) -> str:
    """Returns the text in one line, with ``..`` for what does not fit the column."""
    text = " ".join(text.split())
    if len(text) <= column.width:
        return text
    kept = column.width - 2
    return ".." + text[-kept:] if column.keep == "end" else text[:kept] + ".."


def _line(columns: Sequence[Column], row: Sequence[str], widths: dict[int, int]) -> str:
    cells = (row[i].rjust(w) if columns[i].right else row[i].ljust(w) for i, w in widths.items())
    return "  ".join(cells).rstrip()
