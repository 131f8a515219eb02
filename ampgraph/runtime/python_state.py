"""`PythonState`: the Python values that a captured forward read, and whether they are still the same."""

from __future__ import annotations

import types
from collections.abc import Iterator
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..capture.containers import copied, has_plain_leaves, is_container, is_small, same
from ..capture.reads import Reads
from .layouts import Layouts

_DEPTH = 3  # of objects inside objects: model.config.rope.base
_GONE = object()

# The attributes of a module or of an object, and the name of one.
Place = tuple[dict[str, Any], str]


class PythonState:
    """The plain attributes that forward read; strides and the state of autograd if it asked for those.

    Left out are attributes that forward sets itself: they would be others at every call.

    Args:
        source: The model.
        reads: What its forward read at capture.
        args: The positional arguments of the capture.
        kwargs: Its keyword arguments.
    """

    def __init__(self, source: nn.Module, reads: Reads, args: tuple, kwargs: dict[str, Any]) -> None:
        self._source = source
        self._paths: dict[tuple[int, str], str] = {}
        self._names: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self._objects: list[Place] = []
        self._containers: list[tuple[Place, Any]] = []
        self._of_class: list[tuple[nn.Module, str, Any]] = []
        paths = reads.paths()
        for key in reads.attributes:
            if key not in reads.carried:
                self._add(reads.modules[key[0]], key[1], paths[key])
        self._plain = [(itemgetter(*names), held) for held, names in self._names.values()]
        self._seen = [copied(get(held)) for get, held in self._plain]
        self._seen_objects = [held[name] for held, name in self._objects]
        self._has_rest = bool(self._objects or self._containers or self._of_class)
        self._autograd = _autograd(source, args, kwargs) if reads.asks_for_gradients else None
        self._layouts = (
            Layouts(source, args, kwargs, reads.asks_for_offset) if reads.asks_for_layout else None
        )

    def fits(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether forward would still read the same. Runs at every call."""
        if torch.compiler.is_dynamo_compiling():  # strict export cannot trace the comparison
            return True
        try:
            if [get(held) for get, held in self._plain] != self._seen:
                return False
        except (KeyError, ValueError, RuntimeError):  # gone, or an array now, which compares item by item
            return False
        if self._has_rest and not self._is_rest_same():
            return False
        if self._layouts is not None and not self._layouts.fits(args, kwargs):
            return False
        return self._autograd is None or self._autograd == _autograd(self._source, args, kwargs)

    def changed(self) -> list[str]:
        """Returns the attributes that are others now, as a user writes them, from the model on."""
        places: list[tuple[Place, Any]] = [*self._containers]
        for (held, names), seen in zip(self._names.values(), self._seen, strict=True):
            places += zip([(held, n) for n in names], seen if len(names) > 1 else [seen], strict=True)
        places += zip(self._objects, self._seen_objects, strict=True)
        others = [place for place, seen in places if not same(place[0].get(place[1], _GONE), seen)]
        return [self._paths[id(held), name] for held, name in others]

    def _is_rest_same(self) -> bool:
        now = [held.get(name, _GONE) for held, name in self._objects]
        return (
            all(map(is_, now, self._seen_objects))
            and all(same(held.get(name, _GONE), seen) for (held, name), seen in self._containers)
            and all(same(getattr(module, name, _GONE), seen) for module, name, seen in self._of_class)
        )

    def _add(self, module: nn.Module, name: str, path: str) -> None:
        if name in vars(module):
            self._add_place(vars(module), name, path, _DEPTH)
        elif has_plain_leaves(value := getattr(type(module), name, _GONE)):
            self._of_class.append((module, name, copied(value)))

    def _add_place(self, held: dict[str, Any], name: str, path: str, depth: int) -> None:
        if (id(held), name) in self._paths:
            return
        self._paths[id(held), name] = path
        value = held[name]
        if has_plain_leaves(value):
            self._names.setdefault(id(held), (held, []))[1].append(name)
        elif is_container(value) and is_small(value):
            self._containers.append(((held, name), copied(value)))
        elif not isinstance(value, nn.Parameter):  # graphs read those where they are
            self._objects.append((held, name))
            for inner in _settings(value) if depth else ():
                self._add_place(vars(value), inner, f"{path}.{inner}", depth - 1)


def _settings(value: object) -> Iterator[str]:
    """Yields the attributes of an object, such as a configuration, that forward may read."""
    if isinstance(value, (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType)):
        return
    if type(value).__module__.partition(".")[0] in ("torch", "ampgraph"):
        return
    for name, inner in getattr(value, "__dict__", {}).items():
        if has_plain_leaves(inner) or hasattr(inner, "__dict__"):
            yield name


def _autograd(source: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[bool, list[bool]]:
    tensors = [*tree_leaves((args, kwargs)), *source.parameters()]
    return torch.is_grad_enabled(), [t.requires_grad for t in tensors if isinstance(t, torch.Tensor)]
