"""Counts how often code may have written a parameter in a way that raises no version counter.

A write through ``.data`` (``p.data.add_(p.grad, alpha=-lr)``, ``target.data.copy_(...)``) raises none, nor
does a collective, and no dispatch of torch tells of them. So the first parameter that is watched replaces
``torch.nn.Parameter.data`` by a property that counts and then asks torch, and
``torch.nn.Module._save_to_state_dict`` by a function that remembers the values it gave out (both tried on
torch 2.13), and `collectives` tells of the others. All stay.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .collectives import tell_of_collectives
from .modes import is_compiling

_DATA: Any = torch._C.TensorBase.data
_asked: dict[int, int] = {}
_watched: dict[int, weakref.ref[Tensor]] = {}
_in_all = [0]
# Values of state dicts that are alive, by their ids, with the parameters whose memory they share.
_lent: dict[int, tuple[weakref.ref[Tensor], int]] = {}


def watch_data(parameter: Tensor) -> None:
    """Counts from now on, as long as the parameter lives."""
    _install()
    key = id(parameter)
    if key not in _watched:
        _asked[key] = 0
        _watched[key] = weakref.ref(parameter, lambda _: _forget(key))


def _forget(key: int) -> None:
    _watched.pop(key, None)
    _asked.pop(key, None)


def times_asked(parameter: Tensor) -> int:
    """Returns how often the data of a watched parameter was asked for, set, or given to a collective.

    While a value of a state dict shares its memory, the number grows at each `times_asked_in_all`.
    """
    return _asked.get(id(parameter), -1)


def times_asked_in_all() -> int:
    """Returns a number that grows with each `times_asked`, which a hot path compares first."""
    if _lent:
        for _, key in [*_lent.values()]:
            _count(key)
    return _in_all[0]


def data_of(parameter: Tensor) -> Tensor:
    """Returns ``parameter.data`` and does not count it."""
    data: Tensor = _DATA.__get__(parameter)
    return data


def _note(parameter: Tensor) -> None:
    _count(id(parameter))


def _count(key: int) -> None:
    if key in _asked:
        _asked[key] += 1
        _in_all[0] += 1


def _lend(value: Tensor, parameter: Tensor) -> None:
    """Counts until ``value`` is gone: a write through its ``.data`` tells nobody."""
    lent, key = id(value), id(parameter)

    def end(_: object) -> None:
        _lent.pop(lent, None)
        _count(key)

    _lent[lent] = weakref.ref(value, end), key


def _get(parameter: Tensor) -> Tensor:
    if is_compiling():
        return _traced(parameter)
    _note(parameter)
    return data_of(parameter)


def _traced(parameter: Tensor) -> Tensor:
    """Does what `data_of` does; in a compiled function, which does not count, it is a call of the graph.

    Dynamo would read the descriptor through the property again, without end.
    """
    data: Tensor = torch._C._autograd._get_data_attr(parameter)  # type: ignore[attr-defined]
    return data


def _set(parameter: Tensor, value: Tensor) -> None:
    _note(parameter)
    _DATA.__set__(parameter, value)


def _delete(parameter: Tensor) -> None:
    _DATA.__delete__(parameter)


def _note_memory(tensors: list[Tensor]) -> None:
    """Counts for each watched parameter that lies in the memory of one of the tensors."""
    found = [parameter for reference in [*_watched.values()] if (parameter := reference()) is not None]
    parameters = [parameter for parameter in found if type(parameter) is torch.nn.Parameter]
    addresses = [*map(Tensor.data_ptr, parameters)]
    for storage in [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]:
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for parameter, address in zip(parameters, addresses, strict=True):
            if begin <= address < end:
                _note(parameter)


def _remember_values(save: Callable[..., None]) -> Callable[..., None]:
    """Returns ``Module._save_to_state_dict`` with a note of the parameters' aliases that it makes."""

    @functools.wraps(save)
    def save_to_state_dict(
        module: torch.nn.Module, destination: Any, prefix: str, *rest: Any, **named: Any
    ) -> None:
        save(module, destination, prefix, *rest, **named)
        for name, parameter in module._parameters.items():
            value = destination.get(prefix + name)
            if id(parameter) in _asked and isinstance(value, Tensor) and value is not parameter:
                _lend(value, parameter)  # type: ignore[arg-type]

    return save_to_state_dict


@functools.cache
def _install() -> None:
    module: Any = torch.nn.Module
    torch.compiler.allow_in_graph(_traced)
    torch.nn.Parameter.data = property(_get, _set, _delete, _DATA.__doc__)  # type: ignore[misc, assignment]
    module._save_to_state_dict = _remember_values(module._save_to_state_dict)
    tell_of_collectives(_note_memory)
