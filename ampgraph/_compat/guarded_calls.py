"""Options and functions of Dynamo that are others while a call of a converted model runs.

Tried on torch 2.11, 2.13 and 2.14, where no other versions are named.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction

from .causal_hints import CAUSAL_HINT, given_hint
from .tracing import compiled_calls
from .version import VERSION


class _Guards:
    """Enables guards that Dynamo omits by default: process options, off while any thread is inside.

    Dynamo draws from a ``random.Random`` object while it captures, and guards on nothing. Inside, it breaks
    the graph there instead, as it does at generators of numpy (tried on torch 2.13).

    Dynamo also compares each result of an ``autograd.Function`` with each argument, in Python code that it
    traces. Inside, it leaves that out for functions that `returns_no_argument` marks (tried on torch 2.13).

    It takes masks of encoders and decoders as they are; see `causal_hints`.

    And it compiles a code object at most 256 times in a process, for all models; every further model of the
    same layers would run unconverted. Inside, only the limit of one model holds, and `times_refused` counts
    how often it does (tried on torch 2.13).
    """

    _inside: ClassVar[Counter[str]] = Counter()
    _before: ClassVar[dict[str, Any]] = {}

    def __init__(self, *options: str) -> None:
        self._options = options

    def __enter__(self) -> None:
        config, inside = torch._dynamo.config, self._inside
        with compiled_calls.mutex:
            replaced = _replacements()  # first: it raises if a torch has other names
            compiled_calls.begin()
            for option in self._options:
                if not inside[option]:
                    self._before[option] = getattr(config, option)
                    setattr(config, option, False)
                inside[option] += 1
            if not inside[_ALL]:
                for owner, name, _, other in replaced:
                    setattr(owner, name, other)
            inside[_ALL] += 1
        _here.calls = getattr(_here, "calls", 0) + 1  # last: `begin` waits, and may be interrupted

    def __exit__(self, *error: object) -> None:
        inside = self._inside
        _here.calls -= 1
        with compiled_calls.mutex:
            compiled_calls.end()
            for option in self._options:
                inside[option] -= 1
                if not inside[option]:
                    setattr(torch._dynamo.config, option, self._before[option])
            inside[_ALL] -= 1
            if not inside[_ALL]:
                for owner, name, value, _ in _replacements():
                    setattr(owner, name, value)


@functools.cache
def _replacements() -> tuple[tuple[Any, str, Any, Any], ...]:
    """Returns (class or module, name, its value in torch, the value inside `_Guards`)."""
    from torch._dynamo import convert_frame
    from torch._dynamo.variables.misc import RandomVariable
    from torch._functorch import autograd_function

    name = "is_supported_random_obj"
    found: list[tuple[Any, str, Any, Any]] = [
        (RandomVariable, name, vars(RandomVariable)[name], staticmethod(lambda _: False)),
        (*CAUSAL_HINT, given_hint),
    ]
    name = "exceeds_recompile_limit"
    if (exceeds := vars(convert_frame).get(name)) is not None:
        found.append((convert_frame, name, exceeds, _own_limit_only(exceeds)))
    if VERSION < (2, 13):  # without `isolate_recompiles`
        for name, replacement in (("compute_cache_size", _own_entries), ("FrameExecStrategy", _own_strategy)):
            of_torch = vars(convert_frame)[name]
            found.append((convert_frame, name, of_torch, replacement(of_torch)))
    helper, name = getattr(autograd_function, "DynamoAutogradFunctionTraceHelper", None), "fwd_trace_helper"
    if helper is not None:
        found.append((helper, name, vars(helper)[name], staticmethod(_trace_helper(getattr(helper, name)))))
    return (*found,)


def _own_limit_only(exceeds: Callable) -> Callable:
    """Returns Dynamo's check of its limits without that of the process; counts how often it refuses."""

    def check(*args: Any) -> tuple[bool, str]:
        if not getattr(_here, "calls", 0):  # another thread is in a call
            return exceeds(*args)  # type: ignore[no-any-return]
        with torch._dynamo.config.patch(accumulated_recompile_limit=sys.maxsize):
            found: tuple[bool, str] = exceeds(*args)
        _here.refused = times_refused() + found[0]
        return found

    return check


def _own_entries(of_torch: Callable) -> Callable:
    """Returns Dynamo's count of what it compiled of a code object, in calls of a model only for that model.

    Otherwise models that share a wrapper of their layers use up the limit for each other.
    """

    def count(frame: Any, entry: Any) -> Any:
        backend = getattr(_here, "backend", None)
        return of_torch(frame, entry if backend is None else _own_from(entry, backend))

    return count


class _Own:
    """An entry of Dynamo's cache whose next one is of the same backend."""

    def __init__(self, entry: Any, backend: Callable) -> None:
        self._entry, self._backend = entry, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    @property
    def next(self) -> _Own | None:
        return _own_from(self._entry.next, self._backend)


def _own_from(entry: Any, backend: Callable) -> _Own | None:
    """Returns the first of an entry and those after it that is of a backend."""
    while entry is not None:
        # torch.compile wraps what it is given.
        if getattr(entry.backend, "compiler_fn", entry.backend) is backend:
            return _Own(entry, backend)
        entry = entry.next
    return None


def _own_strategy(of_torch: Callable) -> Callable:
    """Returns Dynamo's constructor for what happens to a refused function, in calls of models only to itself.

    Dynamo would run what the function calls with graphs of any backend whose guards hold: those of other
    models, or of some that are gone. What Dynamo compiled of the function itself runs on.
    """

    def strategy(current: Any, inside: Any) -> Any:
        if getattr(_here, "calls", 0) and inside == _FrameAction.RUN_ONLY:
            return of_torch(_FrameAction.RUN_ONLY, _FrameAction.DEFAULT)
        return of_torch(current, inside)

    return strategy


_here = threading.local()


@contextlib.contextmanager
def compiling_for(backend: Callable | None) -> Iterator[None]:
    """Tells `_own_entries` which backend this thread compiles with; None if Dynamo sees another object."""
    before = getattr(_here, "backend", None)
    _here.backend = backend
    try:
        yield
    finally:
        _here.backend = before


def times_refused() -> int:
    """Returns how often Dynamo refused to compile a function once more, in calls of models in this thread."""
    return getattr(_here, "refused", 0)


def returns_no_argument(forward: Callable) -> Callable:
    """Marks the ``forward`` of an ``autograd.Function``: none of its results is an argument."""
    setattr(forward, _RETURNS_NO_ARGUMENT, True)
    return forward


def _trace_helper(of_torch: Callable) -> Callable:
    """Returns what Dynamo traces for the ``forward`` of an ``autograd.Function``."""

    def helper(forward: Callable) -> Callable:
        if not hasattr(forward, _RETURNS_NO_ARGUMENT):
            return of_torch(forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return forward(*args, **kwargs)

        return call

    return helper


_RETURNS_NO_ARGUMENT = "ampgraph_returns_no_argument"
# Without it, hooks that modules gain or lose later are not seen.
_ALL = "<all>"
_OPTIONS = ["skip_nnmodule_hook_guards"]
if VERSION < (2, 13):
    _OPTIONS.append("skip_tensor_guards_with_matching_dict_tags")
guards, guards_of_whole = _Guards(*_OPTIONS), _Guards(*_OPTIONS, "optimize_ddp")
