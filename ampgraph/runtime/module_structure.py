"""`Structure`: detects that a model has gained or lost a part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from .._compat import hooks_registered

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Structure:
    """The modules of a model at capture, with their parts, hooks and instance ``forward``.

    Attributes:
        modules: All modules, at any depth.
    """

    def __init__(self, source: nn.Module) -> None:
        self._hook_count = hooks_registered()  # first: another thread may register a hook now
        self.modules = tuple(source.modules())
        slots: list[dict[str, Any]] = [slots for m in self.modules for slots in (m._parameters, m._buffers)]
        children = [m._modules for m in self.modules]
        # Most are empty, and one call checks that all of them still are.
        self._empty = [held for held in (*slots, *children) if not held]
        self._children = [held for held in children if held]
        self._slots = [held for held in slots if held]
        self._vars = [vars(m) for m in self.modules]
        hooks = [held for own in self._vars for name in _HOOKS if (held := own.get(name)) is not None]
        self._unhooked = [held for held in hooks if not held]
        self._hooked = [held for held in hooks if held]
        # A proxy may compute its mode.
        self._plain = [vars(m) for m in self.modules if not hasattr(type(m), "training")]
        self._computed = [m for m in self.modules if hasattr(type(m), "training")]
        self._seen = self._now()

    def is_current(self) -> bool:
        """Whether no part was added or removed, including parts that are None. Runs at every call."""
        return not any(self._empty) and self._seen == self._now() and not self._has_new_hooks()

    def _has_new_hooks(self) -> bool:
        """Whether a module without hooks has one now; checks only if any hook was registered since."""
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
        """Returns the training mode of every module; a model may run other code in another mode."""
        return (*[own["training"] for own in self._plain], *[m.training for m in self._computed])
