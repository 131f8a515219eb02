"""Counts how often code may have written a parameter in a way that raises no version counter.

A write through ``.data`` (``p.data.add_(p.grad, alpha=-lr)``, ``target.data.copy_(...)``) raises none, nor
does a collective, and no dispatch of torch tells of them. So the first parameter that is watched replaces
``torch.Tensor.data`` by a property that counts and then asks torch (tried on torch 2.11 and 2.13), and
`collectives` tells of the others. Both stay. The tensor may be a parameter, or another with its memory: a row
of it, a value of ``state_dict``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .collectives import tell_of_collectives
from .modes import is_batched, is_compiling, is_of_transform

_DATA: Any = torch._C.TensorBase.data
_asked: dict[int, int] = {}
_watched: dict[int, weakref.ref[Tensor]] = {}
_in_all = [0]
# On the Python object of a storage, which lives as long as the storage: the keys of the parameters there.
_KEYS = "_ampgraph_parameters"
_PLAIN = (Tensor, torch.nn.Parameter)


def watch_data(parameter: Tensor) -> None:
    """Counts from now on, as long as the parameter lives."""
    _install()
    key = id(parameter)
    if key not in _watched:
        _asked[key] = 0
        _watched[key] = weakref.ref(parameter, lambda _: _forget(key))
        _mark_storage(parameter)


def _forget(key: int) -> None:
    _watched.pop(key, None)
    _asked.pop(key, None)


def times_asked(parameter: Tensor) -> int:
    """Returns how often the data of a watched parameter was asked for, set, or given to a collective."""
    return _asked.get(id(parameter), -1)


def times_asked_in_all() -> int:
    """Returns a number that grows with each `times_asked`, which a hot path compares first."""
    return _in_all[0]


def data_of(parameter: Tensor) -> Tensor:
    """Returns ``parameter.data`` and does not count it."""
    data: Tensor = _DATA.__get__(parameter)
    return data


def _mark_storage(parameter: Tensor) -> None:
    if type(parameter) is torch.nn.Parameter and parameter.layout == torch.strided:
        storage = parameter.untyped_storage()
        setattr(storage, _KEYS, {*getattr(storage, _KEYS, ()), id(parameter)})


def _keys_of(tensor: Tensor) -> Iterable[int]:
    """Returns the keys of the watched parameters in whose memory a tensor lies."""
    if id(tensor) in _asked:
        return (id(tensor),)
    if not _asked or type(tensor) not in _PLAIN or tensor.layout != torch.strided:
        return ()
    if is_of_transform(tensor) or is_batched(tensor):
        return ()
    keys: set[int] = getattr(tensor.untyped_storage(), _KEYS, set())
    return keys & _asked.keys()  # one that is gone may have left its key


def _note(tensor: Tensor) -> None:
    for key in _keys_of(tensor):
        if (count := _asked.get(key)) is not None:  # another thread may forget it now
            _asked[key] = count + 1
        _in_all[0] += 1


def _get(tensor: Tensor) -> Tensor:
    if is_compiling():
        return _traced(tensor)
    _note(tensor)
    return data_of(tensor)


def _traced(parameter: Tensor) -> Tensor:
    """Does what `data_of` does; in a compiled function, which does not count, it is a call of the graph.

    Dynamo would read the descriptor through the property again, without end.
    """
    data: Tensor = torch._C._autograd._get_data_attr(parameter)  # type: ignore[attr-defined]
    return data


def _set(tensor: Tensor, value: Tensor) -> None:
    _note(tensor)
    _DATA.__set__(tensor, value)
    if id(tensor) in _asked:
        _mark_storage(tensor)


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


@functools.cache
def _install() -> None:
    torch.compiler.allow_in_graph(_traced)
    torch.Tensor.data = property(_get, _set, _delete, _DATA.__doc__)  # type: ignore[misc, assignment]
    tell_of_collectives(_note_memory)
