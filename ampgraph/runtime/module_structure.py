"""`Structure`: notices that a model has gained or lost a part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from .._compat import hooks_registered

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Structure:
    """The modules of a model, and the parts, hooks and own ``forward`` that each of them had.

    Attributes:
        modules: All modules, at any depth.
    """

    def __init__(self, source: nn.Module) -> None:
        self._hook_count = hooks_registered()  # first: another thread may register one meanwhile
        self.modules = tuple(source.modules())
        slots: list[dict[str, Any]] = [slots for m in self.modules for slots in (m._parameters, m._buffers)]
        children = [m._modules for m in self.modules]
        # Most are empty, and whether they still are takes one call for all.
        self._empty = [held for held in (*slots, *children) if not held]
        self._children = [held for held in children if held]
        self._slots = [held for held in slots if held]
        self._vars = [vars(m) for m in self.modules]
        hooks = [held for own in self._vars for name in _HOOKS if (held := own.get(name)) is not None]
        self._unhooked = [held for held in hooks if not held]
        self._hooked = [held for held in hooks if held]
        # A module that stands for another may compute its mode.
        self._plain = [vars(m) for m in self.modules if not hasattr(type(m), "training")]
        self._computed = [m for m in self.modules if hasattr(type(m), "training")]
        self._seen = self._now()

    def is_current(self) -> bool:
        """Whether nothing came or went, None included. Runs at every call."""
        return not any(self._empty) and self._seen == self._now() and not self._has_new_hooks()

    def _has_new_hooks(self) -> bool:
        """Whether a module without hooks has one now; looks only where anything was hooked meanwhile."""
        if (count := hooks_registered()) == self._hook_count:
            return False
        if any(self._unhooked):
            return True
        self._hook_count = count
        return False

    def _now(self) -> tuple[Sequence[object], ...]:
        children = list(chain.from_iterable(map(dict.values, self._children)))
        tensors = chain.from_iterable(map(dict.values, self._slots))
        forwards = [own.get("forward") for own in self._vars]
        names, are_none = list(chain.from_iterable(self._slots)), [tensor is None for tensor in tensors]
        return children, names, are_none, forwards, list(chain.from_iterable(self._hooked))

    def training_modes(self) -> tuple[bool, ...]:
        """Returns the training mode of every module, by which a model may run other code."""
        return (*[own["training"] for own in self._plain], *[m.training for m in self._computed])
