"""The origin of a node: its name, its op, its module paths and the user's source line."""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import nn
from torch.fx import Graph, Node

from ._compat import OpOverload
from .own_files import AMPGRAPH, TORCH

_ITEM = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")
_SELF = re.compile(r"^L\[['\"]?\w+['\"]?\]\.?|^L__self___?")
_GETATTR = re.compile(r"^getattr\((?P<of>.*), (?P<quote>['\"])(?P<name>.*)(?P=quote)\)(?P<rest>.*)$")
_OF_DYNAMO = ("L[", "G[", "L__self__")
# torch.export's word for a node that it adds outside of every module, for sizes.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Code that is not the user's: torch, ampgraph's own calls during a capture, and generated code.
_NOT_USERS = (TORCH, AMPGRAPH, "<")
K = TypeVar("K", bound=Hashable)
Part = TypeVar("Part")


def module_paths_of(node: Node) -> Iterator[str]:
    """Yields the paths of the modules around ``node``, innermost first, as in ``named_modules()``."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        if path != _NO_MODULE:
            yield clean_path(path)


def module_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of each module, as in ``named_modules()``; a shared module has several."""
    names: dict[int, list[str]] = {}
    for path, module in _paths(model, "", ()):
        names.setdefault(id(module), []).append(path)
    return tuple(map(tuple, names.values()))


def _paths(module: nn.Module, path: str, around: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    around = (*around, module)
    for name, child in module._modules.items():
        if child is not None and not any(child is outer for outer in around):
            yield from _paths(child, f"{path}.{name}" if path else name, around)


def module_path(node: Node) -> str:
    """Returns the innermost module's path, ``""`` for the root."""
    return next(module_paths_of(node), "")


def module_stack(node: Node) -> tuple[str, ...]:
    """Returns the paths of the modules around ``node``, outermost first, without the root."""
    return tuple(path for path in reversed(list(module_paths_of(node))) if path)


def beside_users(
    scopes: Mapping[K, tuple[Part, ...]], users: Mapping[K, Sequence[K]], moved: Iterable[K]
) -> dict[K, tuple[Part, ...]]:
    """Moves nodes without a module (casts, parameters) to the innermost scope around all of their users.

    Args:
        scopes: The scope of every node, outermost part first; the scope of a graph's output is ``()``.
        users: The readers of each moved node.
        moved: Nodes to move, in graph order. A user of a moved node may also move.
    """
    result = dict(scopes)
    for node in reversed(list(moved)):
        if around := [result[user] for user in users[node]]:
            result[node] = _common_prefix(around)
    return result


def _common_prefix(scopes: Sequence[tuple[Part, ...]]) -> tuple[Part, ...]:
    first = min(scopes, key=len)
    for depth, part in enumerate(first):
        if any(scope[depth] != part for scope in scopes):
            return first[:depth]
    return first


def clean_path(path: str) -> str:
    """Turns the name that a capture front end gives a module into its ``named_modules()`` path.

    torch.export gives the path. Dynamo gives an expression: ``L['self'].layers[0]``, ``G['model'].layers[0]``
    for a global or, for names that are no identifiers, ``getattr(L['self'], 'block[0]')``.
    """
    if found := _GETATTR.match(path):
        of, name, rest = clean_path(found["of"]), found["name"], found["rest"].lstrip(".")
        return ".".join(part for part in (of, name, rest) if part)
    if not path.startswith(_OF_DYNAMO):
        return path
    path = _SELF.sub("", path)
    path = _ITEM.sub(r".\1", path)
    parts = [p for p in path.split(".") if p and p != "_modules"]
    return ".".join(parts)


def user_line(node: Node) -> str:
    """Returns ``file:line`` of the user's code behind a node, torch's if there is no other, or ``""``.

    A node of the loss-scaling boundary has no line.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith((AMPGRAPH, "<eval_with_key>"))]
    users = [frame for frame in frames if not frame[0].startswith(_NOT_USERS)] or frames
    return ":".join(users[-1]) if users else ""


def is_item(node: Node) -> bool:
    """Whether the node is a `getitem` on an op with several results."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    return isinstance(node.args[0].meta.get("val"), (list, tuple))


def maker_of_item(node: Node) -> Node:
    """Returns the op of which a node is one of several results; for any other node, the node itself."""
    return node.args[0] if is_item(node) else node  # type: ignore[return-value]


def op_name(node: Node) -> str:
    """Returns ``"aten.conv2d"``, with the overload where it is not the default one; ``""`` for no op."""
    if node.op != "call_function":
        return ""
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__name__", str(node.target))
    return str(node.target).removesuffix(".default")


def names_of(graph: Graph) -> tuple[list[str], list[str]]:
    """Returns the names of a graph's ops, and those of its other nodes."""
    ops = [node.name for node in graph.nodes if node.op == "call_function"]
    return ops, [node.name for node in graph.nodes if node.op != "call_function"]


def label_of(node: Node) -> str:
    """Returns a readable name of a node: a parameter's path, ``split[0]`` for one result, or its name."""
    if node.op == "get_attr":
        return str(node.target)
    if is_item(node):
        return f"{label_of(node.args[0])}[{node.args[1]}]"  # type: ignore[arg-type]
    return node.name
