"""`Structure`: detects that a model has gained or lost a part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import nn

from .._compat import dict_versions, hooks_registered
from ..proxy.module_parts import HOOKS, TABLES
from .held_tensors import HeldTensors, Kinds

# The training mode of every module, because a model may run other code in another mode; and the kinds of
# its tensors.
Flags = tuple[tuple[bool, ...], Kinds]


class Structure:
    """Modules at capture, with their classes, parts, hooks and instance ``forward``.

    Each check reads all modules in a few calls of C functions that Dynamo can trace. It keeps the dicts,
    which show later changes, and compares no values of tensors. Where Python tells that no dict was written
    to, nothing else is read.

    Args:
        modules: The modules.
        counts_data: Whether to count how often ``.data`` of their parameters is set.

    Attributes:
        modules: The modules.
        tensors: The parameters and buffers of the modules.
    """

    def __init__(self, modules: Iterable[nn.Module], counts_data: bool = False) -> None:
        self._hook_count = hooks_registered()  # first: another thread may register a hook now
        self.modules = tuple(modules)
        self._classes = [*map(type, self.modules)]
        slots: list[dict[str, Any]] = [held for m in self.modules for held in (m._parameters, m._buffers)]
        children = [m._modules for m in self.modules]
        # Most are empty, and one call checks that all of them still are.
        self._empty = [held for held in (*slots, *children) if not held]
        self._children = [held for held in children if held]
        own = [vars(m) for m in self.modules]
        self._own_forward = [held for held in own if "forward" in held]
        self._no_forward = [held for held in own if "forward" not in held]
        self._hooked = [held for o in own for name in HOOKS if (held := o.get(name))]
        unhooked = [(o, name) for o in own for name in HOOKS if not o.get(name)]
        self._unhooked, self._unhooked_names = [o for o, _ in unhooked], [name for _, name in unhooked]
        # Code may give a module another dict: ``module._forward_hooks = OrderedDict()``.
        places = [(o, name, o[name]) for o in own for name in (*TABLES, *HOOKS) if o.get(name)]
        self._owners = [owner for owner, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._dicts = [held for _, _, held in places]
        # A proxy may compute its mode.
        self._plain = [vars(m) for m in self.modules if not hasattr(type(m), "training")]
        self._computed = [m for m in self.modules if hasattr(type(m), "training")]
        self._seen = self._now()
        self.tensors = HeldTensors([held for held in slots if held], counts_data)
        self._versions = None
        if not self._computed:
            self._versions = dict_versions([*own, *slots, *children, *self._hooked], self.modules)
        self._noted: tuple[bytes, Flags] | None = None

    def flags(self) -> Flags | None:
        """Returns modes and kinds, or None if a part changed. Runs at every call.

        As long as nothing was written to a module or its dicts, it returns one object.
        """
        if self._versions is None or torch.compiler.is_dynamo_compiling():
            return self.flags_now() if self.is_current() else None
        versions, noted = self._versions(), self._noted  # first: another thread may write now
        if noted is not None and versions == noted[0] and self._are_hooks_and_data_same():
            return noted[1]
        if not self.is_current():
            return None
        flags = self.flags_now()
        self._noted = versions, flags
        return flags

    def flags_now(self) -> Flags:
        """Returns modes and kinds, and looks for no other change."""
        return self.training_modes(), self.tensors.kinds()

    def _are_hooks_and_data_same(self) -> bool:
        """Whether no module has its first hook now, and no parameter other data."""
        return self.tensors.are_untouched() and not self._has_new_hooks()

    def is_current(self) -> bool:
        """Whether no part was added, removed or exchanged for one of another kind. Runs at every call."""
        return (
            [*map(type, self.modules)] == self._classes
            and all(map(is_, map(dict.get, self._owners, self._names), self._dicts))
            and not any(self._empty)
            and not any(map(dict.__contains__, self._no_forward, repeat("forward")))
            and self._seen == self._now()
            and not self._has_hooks()
        )

    def _has_new_hooks(self) -> bool:
        """Whether a module without hooks has one now; checks only if any hook was registered since."""
        if (count := hooks_registered()) == self._hook_count:
            return False
        if self._has_hooks():
            return True
        self._hook_count = count
        return False

    def _has_hooks(self) -> bool:
        """Whether a module without hooks has one now; code may give it another dict of them."""
        return any(map(dict.get, self._unhooked, self._unhooked_names))

    def _now(self) -> tuple[Sequence[object], ...]:
        flatten = chain.from_iterable
        children = [*flatten(map(dict.values, self._children))]
        forwards = [own.get("forward") for own in self._own_forward]
        return children, forwards, [*flatten(map(dict.items, self._hooked))]

    def training_modes(self) -> tuple[bool, ...]:
        """Returns the training mode of every module; a model may run other code in another mode."""
        modes = tuple(map(dict.__getitem__, self._plain, repeat("training")))
        return (*modes, *[m.training for m in self._computed]) if self._computed else modes
