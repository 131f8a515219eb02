"""Tables as plain text (columns of limited width, numbers to the right) and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Control characters but line feed, and what turns the direction of writing (CVE-2021-42574).
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Returns the text with control characters written out: names of modules may hold any."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: The heading.
        width: Longer cells are shortened to this many characters; not in Markdown.
        right: Whether cells are aligned to the right.
        keep: Which part of a long cell stays: ``"start"`` or ``"end"``.
    """

    title: str
    width: int = 40
    right: bool = False
    keep: str = "start"


@dataclass(frozen=True)
class Section:
    """One part of a report.

    Attributes:
        title: The heading in Markdown; plain text has none.
        columns: The table's columns.
        rows: The table's rows; without any, ``empty`` is said instead.
        notes: Lines under the table.
        empty: What to say where there are no rows.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: tuple[str, ...] = ()
    empty: str = ""

    def text(self, most: int | None = None) -> str:
        """Returns the section as plain text, with no more than ``most`` rows of its table."""
        if not self.rows:
            return "\n".join((self.empty, *self.notes))
        left_out = len(self.rows) - len(self.rows[:most])
        more = (f"(and {left_out} more)",) if left_out else ()
        return "\n".join((table(self.columns, self.rows[:most]), *more, *self.notes))

    def markdown(self) -> str:
        """Returns the section as Markdown, under a heading of the second level."""
        body = markdown_table(self.columns, self.rows) if self.rows else self.empty
        return "\n\n".join((f"## {self.title}", body, *self.notes))


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Returns the rows under their headings; a column without any content is left out."""
    cells = [[shorten(cell, column) for cell, column in zip(row, columns, strict=True)] for row in rows]
    shown = _shown(columns, cells)
    widths = {i: max(len(columns[i].title), *(len(row[i]) for row in cells)) for i in shown}
    rules = ["-" * widths.get(i, 0) for i in range(len(columns))]
    return "\n".join(_line(columns, row, widths) for row in ([c.title for c in columns], rules, *cells))


def markdown_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Returns the rows as a Markdown table, nothing shortened; a column without any content is left out."""
    cells = [[_markdown_cell(cell) for cell in row] for row in rows]
    shown = _shown(columns, cells)
    lines = ([c.title for c in columns], ["--:" if c.right else "---" for c in columns], *cells)
    return "\n".join(f"| {' | '.join(line[i] for i in shown)} |" for line in lines)


def _markdown_cell(cell: str) -> str:
    return printable(" ".join(cell.split())).replace("|", "\\|").replace("<", "&lt;")


def shorten(text: str, column: Column) -> str:
    """Returns the text in one line, with ``..`` for what does not fit the column."""
    text = printable(" ".join(text.split()))
    if len(text) <= column.width:
        return text
    kept = column.width - 2
    return ".." + text[-kept:] if column.keep == "end" else text[:kept] + ".."


def _shown(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
    return [i for i in range(len(columns)) if any(row[i] for row in cells)]


def _line(columns: Sequence[Column], row: Sequence[str], widths: dict[int, int]) -> str:
    cells = (row[i].rjust(w) if columns[i].right else row[i].ljust(w) for i, w in widths.items())
    return "  ".join(cells).rstrip()
