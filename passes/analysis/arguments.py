"""The arguments of a call, by place and by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from ampgraph.ops import kernels


def tensor_arguments(node: Node) -> Iterator[tuple[tuple[int | str, ...], Node]]:
    """Yields (path, node) for every node among the arguments; a path starts with a position or keyword."""
    for position, value in enumerate(node.args):
        if isinstance(value, Node):  # first because common
            yield (position,), value
        else:
            yield from _walk((position,), value)
    for name, value in node.kwargs.items():
        yield from _walk((name,), value)


def argument_name(node: Node, path: tuple[int | str, ...]) -> str:
    """Returns the schema's name of the argument that a path leads into."""
    first = path[0]
    if isinstance(first, str):
        return first
    return kernels.argument_names(node.target)[first]  # type: ignore[arg-type]


def argument(node: Node, name: str) -> Any:
    """Returns an argument of an ATen call by its schema name, or None when it is not given."""
    args, kwargs = node.args, node.kwargs
    if name in kwargs:
        return kwargs[name]
    names = kernels.argument_names(node.target)  # type: ignore[arg-type]
    position = names.index(name) if name in names else len(args)
    return args[position] if position < len(args) else None


def _walk(path: tuple[int | str, ...], value: Any) -> Iterator[tuple[tuple[int | str, ...], Node]]:
    if isinstance(value, Node):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk((*path, i), item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk((*path, key), item)
