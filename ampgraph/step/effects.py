"""What a loss function does to its surroundings while a step is traced, which a graph would not repeat."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from .._compat import FakeTensor, replaced, storage_key
from ..capture.random_numbers import noting_random_numbers
from ..capture.real_writes import writes
from ..capture.user_code import frames
from ..errors import AmpGraphError
from ..own_files import is_users
from .surroundings import Surroundings

_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero"}
_READS |= {f"__{name}__" for name in ("float", "int", "bool", "index", "complex", "array", "contains")}


class RefusedOutside(TorchFunctionMode):
    """Refuses writes to tensors that have values while a step is traced, and reads of their values.

    A trace gives fake tensors to parameters, buffers and arguments. All others belong to the surroundings.
    No tensor may get other memory, which a graph does not see.

    Args:
        arguments: The arguments of the step.

    Attributes:
        asks_for_offsets: Whether an argument was asked where it begins in its memory.

    Raises:
        AmpGraphError: From the call inside that writes or reads.
    """

    def __init__(self, arguments: Iterable[object]) -> None:
        super().__init__()
        self.asks_for_offsets = False
        self._memory = {storage_key(x) for x in arguments if isinstance(x, Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            raise AmpGraphError(f"loss_fn replaces the memory of a tensor{_line()}")
        if name == "storage_offset" and storage_key(args[0]) in self._memory:
            self.asks_for_offsets = True
        is_write = name == "__set__" or writes(func) or "out" in kwargs
        if is_write or name in _READS:
            involved = (kwargs["out"],) if "out" in kwargs else args[:1] if is_write else args
            if any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in involved):
                verb = "writes to" if is_write else "reads the value of"
                raise AmpGraphError(f"loss_fn {verb} a tensor that is no argument{_line()}")
        return func(*args, **kwargs)


def without_saved_tensor_hooks() -> contextlib.AbstractContextManager[None]:
    """Refuses hooks for the tensors that autograd saves: no graph calls them, so it recomputes nothing.

    Raises:
        AmpGraphError: From the code inside that enters such hooks.
    """
    original, tracing = saved_tensors_hooks.__enter__, threading.get_ident()

    def enter(hooks: saved_tensors_hooks) -> None:
        if threading.get_ident() == tracing:
            raise AmpGraphError(f"loss_fn checkpoints, or has hooks for what autograd saves{_line()}")
        original(hooks)

    return replaced(saved_tensors_hooks, "__enter__", enter)


@contextlib.contextmanager
def without_effects(surroundings: Surroundings) -> Iterator[list[str]]:
    """Yields a list that fills with what the code inside changes outside; puts everything back."""
    found: list[str] = []
    places = [(place, place.value()) for place in surroundings.places]
    objects = [(path, held, _copied(held)) for path, held in surroundings.objects if _is_mutable(held)]
    values = surroundings.values()
    try:
        with noting_random_numbers(values, lambda: True) as drawn:
            yield found
    finally:
        found += drawn.found
        for path, held, before in objects:
            if not _is_same(held, before):
                found.append(f"changes {path}")
                _put_back(held, before)
        for place, value in places:
            if place.value() is not value:
                found.append(f"changes {place.path}")
                place.put(value)


def _line() -> str:
    frame = next((f for f in frames() if is_users(f.f_code.co_filename)), None)
    return f" ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""


def _is_mutable(held: Any) -> bool:
    return isinstance(held, (dict, list, set, deque))


def _copied(held: Any) -> Any:
    return dict(held) if isinstance(held, dict) else set(held) if isinstance(held, set) else [*held]


def _is_same(held: Any, before: Any) -> bool:
    if len(held) != len(before):
        return False
    if isinstance(held, set):
        return bool(held == before)
    if isinstance(held, dict):
        return all(map(is_, held, before)) and all(map(is_, held.values(), before.values()))
    return all(map(is_, held, before))


def _put_back(held: Any, before: Any) -> None:
    held.clear()
    (held.update if isinstance(held, (dict, set)) else held.extend)(before)
