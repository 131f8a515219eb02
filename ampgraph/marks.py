"""What ampgraph notes on graph nodes: one type for each mark, and the functions that read and write them.

A mark reads like a dictionary too: ``node.meta["ampgraph"]["reason"]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from torch.fx import Node

BoundaryRole = Literal["scale", "unscale", "finite check", "shadow"]

META_KEY = "ampgraph"
_INPUT_KEY = "ampgraph_input"


class Mark(Mapping[str, Any]):
    """Base of all marks; subclasses are frozen dataclasses."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dict__:
            raise KeyError(name)
        return self.__dict__[name]

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(fields(self))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, repr=False)
class CastMark(Mark):
    """On a cast that ampgraph inserted.

    Attributes:
        inserted: The pass that made it.
        reason: Who forced each side.
        bytes: Bytes that it reads and writes.
        is_parameter: Whether it casts a parameter, buffer or constant.
    """

    inserted: str
    reason: str
    bytes: int
    is_parameter: bool


@dataclass(frozen=True, repr=False)
class ClampMark(Mark):
    """On the clamp before a cast whose tensor is out of range: the pass that made it, and why."""

    clamped: str
    reason: str


@dataclass(frozen=True, repr=False)
class DecisionMark(Mark):
    """On a node of the source model: see `Decision`."""

    by: str
    reason: str


@dataclass(frozen=True, repr=False)
class BoundaryMark(Mark):
    """On a node of the loss-scaling boundary: its role, in the rewritten graph and in its backward graph."""

    boundary: BoundaryRole


@dataclass(frozen=True, repr=False)
class StorageMark(Mark):
    """On the clone that stands for written memory between `Normalize` and `CleanCasts`."""


@dataclass(frozen=True, repr=False)
class InputMark(Mark):
    """On a placeholder that stands for a tensor of the model; a capture writes it, and it stays.

    Attributes:
        is_parameter: Whether it is a parameter, or a buffer or constant that is read like one.
        is_table: Whether it is a buffer or a constant.
        peak: The largest finite magnitude in it; 0 where it is not known.
    """

    is_parameter: bool = False
    is_table: bool = False
    peak: float = 0.0


M = TypeVar("M", bound=Mark)
_NO_INPUT = InputMark()


def mark_of(node: Node, kind: type[M]) -> M | None:
    """Returns the mark of a node if it is of that kind."""
    found = node.meta.get(META_KEY)
    return found if found is not None and isinstance(found, kind) else None


def set_mark(node: Node, mark: Mark) -> None:
    """Marks a node, over any mark that it has."""
    node.meta[META_KEY] = mark


def drop_mark(node: Node) -> None:
    """Takes the mark of a node away; an `InputMark` stays."""
    node.meta.pop(META_KEY, None)


def input_mark(node: Node) -> InputMark:
    """Returns the facts about the tensor behind a placeholder; the defaults if it has no mark."""
    return node.meta.get(_INPUT_KEY, _NO_INPUT)


def set_input_mark(node: Node, mark: InputMark) -> None:
    """Marks a placeholder."""
    node.meta[_INPUT_KEY] = mark


def drop_input_mark(node: Node) -> None:
    """Takes the `InputMark` of a node away."""
    node.meta.pop(_INPUT_KEY, None)
