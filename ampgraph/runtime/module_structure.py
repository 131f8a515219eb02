"""`Structure`: detects that a model has gained or lost a part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import nn

from .._compat import hooks_registered

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Structure:
    """The modules of a model at capture, with their parts, hooks and instance ``forward``.

    Each check reads all modules in a few calls of C functions that Dynamo can trace. It keeps the dicts,
    which show later changes, and compares no tensors.

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
        own = [vars(m) for m in self.modules]
        self._own_forward = [held for held in own if "forward" in held]
        self._no_forward = [held for held in own if "forward" not in held]
        hooks = [held for o in own for name in _HOOKS if (held := o.get(name)) is not None]
        self._unhooked = [held for held in hooks if not held]
        self._hooked = [held for held in hooks if held]
        # A proxy may compute its mode.
        self._plain = [vars(m) for m in self.modules if not hasattr(type(m), "training")]
        self._computed = [m for m in self.modules if hasattr(type(m), "training")]
        self._seen = self._now()

    def is_current(self) -> bool:
        """Whether no part was added or removed, including parts that are None. Runs at every call."""
        return (
            not any(self._empty)
            and not any(map(dict.__contains__, self._no_forward, repeat("forward")))
            and self._seen == self._now()
            and not self._has_new_hooks()
        )

    def _has_new_hooks(self) -> bool:
        """Whether a module without hooks has one now; checks only if any hook was registered since."""
        if (count := hooks_registered()) == self._hook_count:
            return False
        if any(self._unhooked):
            return True
        self._hook_count = count
        return False

    def _now(self) -> tuple[Sequence[object], ...]:
        flatten = chain.from_iterable
        children = [*flatten(map(dict.values, self._children))]
        names = [*flatten(self._slots)]
        are_none = [*map(is_, flatten(map(dict.values, self._slots)), repeat(None))]
        forwards = [own.get("forward") for own in self._own_forward]
        return children, names, are_none, forwards, [*flatten(self._hooked)]

    def training_modes(self) -> tuple[bool, ...]:
        """Returns the training mode of every module; a model may run other code in another mode."""
        modes = tuple(map(dict.__getitem__, self._plain, repeat("training")))
        return (*modes, *[m.training for m in self._computed]) if self._computed else modes
