"""Buffers, parameters and submodules that forward replaces, which a graph cannot follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .._compat import storage_key
from ..proxy.module_parts import TABLES
from ..proxy.module_proxy import source_of
from .containers import restore

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Assigned(NamedTuple):
    """A buffer to which forward has assigned another tensor."""

    module: nn.Module
    name: str
    old: torch.Tensor
    new: torch.Tensor


class Replaced:
    """Collects what forward replaces in a model while it is captured.

    A tensor that forward assigns to a buffer (``self.mean = new``) is copied into the buffer at the end of
    forward, as a part of the graph, if shape, dtype and device are the buffer's. A graph cannot follow other
    changes.

    Attributes:
        paths: What forward replaces, as paths from the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths: list[str] = []
        self._model = model
        self._sources = {path: source_of(module) for path, module in model.named_modules()}

    @contextlib.contextmanager
    def noted(self, is_set: Callable[[nn.Module, str], bool]) -> Iterator[None]:
        """Watches forward; afterwards the model holds what it held before.

        Args:
            is_set: Whether forward assigned an attribute of a module, by the attribute's name.
        """
        calls: list[list[dict[str, Any]]] = []

        def enter(*_: object) -> None:
            calls.append(self._state())

        def leave(*_: object) -> None:
            assigned: list[_Assigned] = []
            for (path, module), old, new in zip(
                self._sources.items(), calls.pop(), self._state(), strict=True
            ):
                names = {**old, **new}
                lost = [n for n in names if _is_lost(old.get(n), new.get(n), is_set(module, n))]
                self._add(path, lost)
                others = [n for n in names if n not in lost and old.get(n) is not new.get(n)]
                assigned += [_Assigned(module, n, old[n], new[n]) for n in others if n in module._buffers]
            _copy_into_buffers(assigned)

        before = self._model.register_forward_pre_hook(enter, prepend=True)
        after = self._model.register_forward_hook(leave)
        held = [(table, table.copy()) for module in self._sources.values() for table in _tables(module)]
        try:
            yield
        finally:
            for table, content in held:
                restore(table, content)
            before.remove()
            after.remove()

    def note_call(self, function: Any, args: tuple) -> None:
        """Records ``tensor.data = new`` in forward, which tracing does not see."""
        if function != SET_DATA:
            return
        for (path, _), entries in zip(self._sources.items(), self._state(), strict=True):
            self._add(path, [f"{name}.data" for name, value in entries.items() if value is args[0]])
        if not self.paths:
            self.paths.append("the data of a tensor")

    def _add(self, path: str, names: list[str]) -> None:
        paths = [f"{path}.{name}".lstrip(".") for name in names]
        self.paths.extend(path for path in paths if path not in self.paths)

    def _state(self) -> list[dict[str, Any]]:
        tables = [[vars(m).get(name, {}) for name in TABLES] for m in self._sources.values()]
        return [{k: v for table in of_one for k, v in table.items()} for of_one in tables]


def _copy_into_buffers(assigned: list[_Assigned]) -> None:
    """Writes what forward assigned to buffers into the buffers, as a part of the graph."""
    memory = {storage_key(old) for _, _, old, _ in assigned}
    # Copies first: forward may exchange two buffers.
    values = [new.clone() if storage_key(new) in memory else new for _, _, _, new in assigned]
    for (module, name, old, new), value in zip(assigned, values, strict=True):
        if not _is_same_memory(old, new):
            old.copy_(value)
        module._buffers[name] = old


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``b`` is ``a`` after a write in place: ``self.mean += x``."""
    is_same = storage_key(a) == storage_key(b) and a.stride() == b.stride()
    return is_same and a.storage_offset() == b.storage_offset()


def _is_lost(old: Any, new: Any, is_set: bool) -> bool:
    """Whether a graph cannot follow the change of an entry; None stands for no entry."""
    if old is new or (old is None and isinstance(new, nn.Module)):  # traced as a part of forward
        return False
    if not (is_set and isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return True
    # A comparison of symbolic sizes would narrow the graph to the example's.
    is_static = all(type(size) is int for size in new.shape)
    alike = is_static and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
    return isinstance(old, nn.Parameter) or not alike


def _tables(module: nn.Module) -> Iterator[Any]:
    yield from (vars(module)[n] for n in (*TABLES, "_non_persistent_buffers_set") if n in vars(module))
