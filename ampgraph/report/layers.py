"""Repeated layers: numbered modules (``h.0`` .. ``h.11``) whose rows are equal but for names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Repeat:
    """Consecutive layers that are equal; the first stands for all.

    Attributes:
        parent: Path of the module that holds them, ``"transformer.h"``.
        first: Number of the first layer.
        last: Number of the last one.
    """

    parent: str
    first: int
    last: int

    @property
    def times(self) -> int:
        """How many layers they are."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        short = self.parent.rpartition(".")[2]
        return f"{_child(self.parent, self.first)} .. {_child(short, self.last)} ({self.times}x)"

    def number_of(self, path: str) -> int | None:
        """Returns the number of the layer that a module path leads into, or None outside of them."""
        if self.parent and not path.startswith(self.parent + "."):
            return None
        number = path[len(self.parent) + 1 if self.parent else 0 :].partition(".")[0]
        inside = number.isdecimal() and self.first <= int(number) <= self.last
        return int(number) if inside else None


def repeats(rows: Iterable[tuple[str, Hashable]]) -> tuple[Repeat, ...]:
    """Returns the repeated layers, outer ones first; none inside of layers that another one stands for.

    Args:
        rows: Module path, and what must be equal; the order counts.
    """
    layers: dict[str, dict[int, list[Hashable]]] = {}
    for path, row in rows:
        parts = path.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal():
                inside = layers.setdefault(".".join(parts[:depth]), {})
                inside.setdefault(int(part), []).append((".".join(parts[depth + 1 :]), row))
    found: list[Repeat] = []
    for parent in sorted(layers, key=lambda path: len(path.split(".")) if path else 0):
        if not is_repeated(parent, found):
            found += _runs(parent, layers[parent])
    return tuple(found)


def is_repeated(path: str, found: Sequence[Repeat]) -> bool:
    """Whether another layer stands for what is at a module path."""
    return any(repeat.number_of(path) not in (None, repeat.first) for repeat in found)


def times(path: str, found: Sequence[Repeat]) -> int:
    """Returns for how many equal rows one at a module path stands, itself included."""
    product = 1
    for repeat in found:
        if repeat.number_of(path) == repeat.first:
            product *= repeat.times
    return product


def representative(path: str, found: Sequence[Repeat]) -> str:
    """Returns the module path in the layers that stand for others which a path corresponds to."""
    for repeat in found:
        number = repeat.number_of(path)
        if number is not None:
            inside = path.removeprefix(_child(repeat.parent, number))
            path = _child(repeat.parent, repeat.first) + inside
    return path


def _runs(parent: str, layers: dict[int, list[Hashable]]) -> list[Repeat]:
    """Returns runs of two or more consecutive numbers with equal rows."""
    numbers = sorted(layers)
    starts = [
        number for number in numbers if number - 1 not in layers or layers[number - 1] != layers[number]
    ]
    runs = groupby(numbers, key=lambda number: sum(start <= number for start in starts))
    spans = [list(run) for _, run in runs]
    return [Repeat(parent, span[0], span[-1]) for span in spans if len(span) > 1]


def _child(parent: str, number: int) -> str:
    return f"{parent}.{number}" if parent else str(number)
