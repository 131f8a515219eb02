"""`CompiledByHooks`: what ``torch.compile`` makes of a model, apart for each set of hooks on its modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from .._compat import hooks_registered, tracing_lock
from ..proxy.module_parts import HOOKS

_MOST = 8  # sets of hooks whose code is kept
# A module's dict, and the name of its hooks in it: code may exchange the dict of the hooks.
_Where = tuple[dict[str, Any], str]
_Key = tuple[tuple[str, str, tuple[Hashable, ...]], ...]


class CompiledByHooks:
    """Runs a model's compiled code for the hooks that its modules have now.

    Dynamo does not try code again on which it gave up, because of a hook that prints for example. With a
    form for each set of hooks, such a hook leaves no trace when it is removed.

    Args:
        source: The model.
        compile_source: Returns a new compiled form of the model.
    """

    def __init__(self, source: nn.Module, compile_source: Callable[[], Callable]) -> None:
        self._source, self._compile = source, compile_source
        self._count = -1
        self._unhooked: list[_Where] = [({"": {0: "not looked at yet"}}, "")]
        self._hooked: list[_Where] = []
        self._ids: list[tuple[int, ...]] = []
        self._key: _Key = ()
        self._forms: dict[_Key, Callable] = {(): compile_source()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self._current_key()
        if form := self._forms.get(key):
            return form(*args, **kwargs)
        if len(self._forms) > _MOST:
            del self._forms[[*self._forms][1]]  # the oldest one with hooks
        form = self._forms[key] = self._compile()
        return form(*args, **kwargs)

    def hooked(self) -> str:
        """Returns the modules that had hooks in the last call, for a message."""
        return ", ".join(dict.fromkeys(path or "the root" for path, _, _ in self._key))

    def _current_key(self) -> _Key:
        """Returns the hooks by module and code; looks at all modules only if one gained or lost a hook."""
        count = hooks_registered()
        if self._held() == self._ids and (count == self._count or not self._has_first_hook()):
            self._count = count
            return self._key
        with tracing_lock():  # a capture in another thread sets hooks for as long as it lasts
            return self._looked_at(count)

    def _held(self) -> list[tuple[int, ...]]:
        return [tuple(own.get(name, ())) for own, name in self._hooked]

    def _has_first_hook(self) -> bool:
        return any(own.get(name) for own, name in self._unhooked)

    def _looked_at(self, count: int) -> _Key:
        found = [(path, vars(m), name) for path, m in self._source.named_modules() for name in HOOKS]
        held = [(path, own, name) for path, own, name in found if own.get(name)]
        self._unhooked = [(own, name) for _, own, name in found if not own.get(name)]
        self._hooked = [(own, name) for _, own, name in held]
        self._ids = self._held()
        self._key = tuple((path, name, tuple(map(_code_of, own[name].values()))) for path, own, name in held)
        self._count = count
        return self._key


def _code_of(hook: object) -> Hashable:
    """Returns the code of a hook, which hooks of one function share, whatever they hold."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    kind: Any = type(hook)
    return getattr(hook, "__code__", kind)
