"""Tensors of a capture that forward keeps outside of the model: in caches, global variables, other objects.

They hold no data. Left where they are, they would reach the next call of the model that was captured.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .._compat import FakeTensor
from .code_place import GONE, Place
from .containers import items_of, length_of, restore
from .held_objects import objects_inside
from .user_code import is_foreign

_CONTAINERS = (dict, list, deque, set, tuple)
_RESTORABLE = (dict, list, deque)
_MOST_ITEMS = 10_000
_RANDOM = frozenset(
    f
    for name in ("rand", "randn", "randint", "randperm", "normal", "multinomial", "bernoulli")
    for f in (getattr(torch, name), getattr(torch, f"{name}_like", None), getattr(Tensor, f"{name}_", None))
    if f is not None
) | {getattr(Tensor, f"{name}_") for name in ("uniform", "random", "exponential", "cauchy", "log_normal")}
CAPTURES_A_COLLECTION = 16
_captures = itertools.count(1)
_seen_frozen: list[int] = []  # the first count of frozen objects that is not 0
_DEPTH = 4  # of containers inside containers
_MOST_ASKED = 256  # objects in one question
_LEFT_OUT = (FrameType, *weakref.ProxyTypes)


class KeptTensors:
    """Finds the tensors that outlive a capture, and removes them from what holds them.

    Args:
        places: Where forward's code may keep a value: global variables, attributes of classes, closures.
        containers: The path, the container and a copy of it, for those in attributes of the model.

    Attributes:
        depends: Names of what keeps tensors that depend on inputs, parameters or buffers: state for a later
            call. Other tensors are tables, which a graph computes in each call.
    """

    def __init__(self, places: Iterable[Place], containers: Iterable[tuple[str, Any, Any]] = ()) -> None:
        self.depends: list[str] = []
        self._made: list[weakref.ref[Tensor]] = []
        self._constant: dict[int, weakref.ref[Tensor]] = {}
        self._places = [(place, place.value()) for place in places]
        seen: set[int] = set()
        self._objects = [
            (path, held, dict(held))
            for place, value in self._places
            for path, held in objects_inside(value, place.path, seen)
        ]
        values = [(place.path, value) for place, value in self._places]
        values += [(f"{path}.{name}", v) for path, _, held in self._objects for name, v in held.items()]
        self._containers = [
            (path, held, copy.copy(held)) for path, value in values for held in _containers_in(value)
        ]
        self._containers += containers
        self._new: set[int] = set()

    @contextlib.contextmanager
    def aging(self) -> Iterator[None]:
        """Finds out which containers are newer than the capture: the garbage collector freezes older objects.

        Objects that the user froze stay frozen. Then every later object counts as new.
        """
        is_free = not _is_frozen_by_user()
        if is_free:
            gc.freeze()
        try:
            yield
        finally:
            if self._alive():
                gc.collect()  # some are alive in reference cycles; it looks at no older object
            if self._alive():
                self._new = {id(o) for o in gc.get_objects() if issubclass(type(o), _CONTAINERS)}
            if is_free:
                gc.unfreeze()
                _collect_now_and_then()

    def note(self, function: Callable, result: Any, read: list[Tensor]) -> None:
        """Records the tensors that a function of torch returned to forward.

        Args:
            function: The function.
            result: What it returned.
            read: The tensors among its arguments.
        """
        # Getters return tensors of the user, too: the base of a view.
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        is_constant = function not in _RANDOM and all(map(self._is_constant, read))
        written = set(map(id, read))
        for tensor in tensors:
            if id(tensor) in written and not self._is_constant(tensor):
                continue  # an argument of the model may be written
            reference: weakref.ref[Tensor] = weakref.ref(tensor)
            self._made.append(reference)
            if is_constant:
                self._constant[id(tensor)] = reference
            else:
                self._constant.pop(id(tensor), None)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a function of torch returned the tensor to forward, which may be an input otherwise."""
        return any(reference() is tensor for reference in self._made)

    def remove(self, ignored: Iterable[object] = ()) -> None:
        """Restores what forward replaced by tensors of the capture, and takes others out of containers.

        Args:
            ignored: Containers to leave alone.
        """
        if not (alive := self._alive()):
            return
        of_capture = {id(tensor) for tensor in alive}
        depends = [name for name, tensors in self._put_back(of_capture) if not self._are_tables(tensors)]
        own = (alive, self._places, self._objects, *ignored)
        referrers = _Referrers(alive)
        for tensor in alive:
            taken = [*_take_out(tensor, referrers, self._new, set(map(id, own)))]
            depends += [] if self._is_constant(tensor) else taken
        self.depends = list(dict.fromkeys(depends))

    def _alive(self) -> list[Tensor]:
        found = {id(tensor): tensor for reference in self._made if (tensor := reference()) is not None}
        return list(found.values())

    def _is_constant(self, tensor: Tensor) -> bool:
        reference = self._constant.get(id(tensor))
        return reference is not None and reference() is tensor

    def _are_tables(self, tensors: list[Tensor]) -> bool:
        return all(map(self._is_constant, tensors))

    def _put_back(self, of_capture: set[int]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yields the name of each variable, attribute and container that it restores, and what it kept."""
        for path, container, before in self._containers:
            if tensors := _of_capture(container, of_capture):
                restore(container, before)
                yield path, tensors
        for place, before in self._places:
            value = place.value()
            if value is not before and _of_capture(value, of_capture):
                place.put(before)
                yield place.path, _of_capture(value, of_capture)
        for path, held, values in self._objects:
            for name, value in list(held.items()):
                if value is values.get(name, GONE) or not _of_capture(value, of_capture):
                    continue
                if name in values:
                    held[name] = values[name]
                else:
                    del held[name]
                yield f"{path}.{name}", _of_capture(value, of_capture)


def _containers_in(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yields a list or dict, unless it is long, and those inside it."""
    if not isinstance(value, _CONTAINERS) or length_of(value) > _MOST_ITEMS or not depth:
        return
    if type(value) in _RESTORABLE:
        yield value
    for _, item in items_of(value):
        yield from _containers_in(item, depth - 1)


def _collect_now_and_then() -> None:
    """Collects older objects: ``gc.freeze`` restarts the counts after which the collector looks at them."""
    if gc.isenabled() and next(_captures) % CAPTURES_A_COLLECTION == 0:
        gc.collect()


def _is_frozen_by_user() -> bool:
    """Whether ``gc.freeze`` was seen in use. The count walks all frozen objects, so once is enough."""
    if not _seen_frozen and (count := gc.get_freeze_count()):
        _seen_frozen.append(count)
    return bool(_seen_frozen)


def _of_capture(value: object, of_capture: set[int]) -> list[Tensor]:
    """Returns the tensors of the capture in a value; those that it held before are real."""
    return [leaf for leaf in tree_leaves(value) if id(leaf) in of_capture]


def _take_out(
    value: object, referrers: _Referrers, new: set[int], ignored: set[int], depth: int = _DEPTH
) -> Iterator[str]:
    """Takes a value out of the containers, caches and objects that hold it; yields their names.

    A container that is newer than the capture goes with what it holds. A dict that something older holds may
    only look new: Python's collector sees an empty dict when it gets its first entry. So it stays. A variable
    or attribute whose earlier value is not known becomes None.

    Args:
        value: What to take out.
        referrers: Who holds what.
        new: What is newer than the capture.
        ignored: Holders to leave alone.
        depth: How many new containers around the value to look at.
    """
    inner = ignored | {id(value)}
    for holder in referrers.of(value):  # no closure here may hold the value: it would count
        if id(holder) in ignored:
            continue
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
            yield f"the cache of {holder.__wrapped__.__qualname__}"
        elif isinstance(holder, dict):
            is_inner = id(holder) in new and depth
            outer = [*_take_out(holder, referrers, new, inner, depth - 1)] if is_inner else []
            if outer or id(holder) not in new or _has_a_name(holder, referrers):
                is_named = not isinstance(value, dict)
                yield from outer or _out_of_dict(holder, value, _owner(holder, referrers), is_named)
        elif id(holder) in new or isinstance(holder, tuple):
            if depth and isinstance(holder, _CONTAINERS):
                yield from _take_out(holder, referrers, new, inner, depth - 1)
        elif isinstance(holder, set):
            holder.discard(value)
            yield "a set"
        elif isinstance(holder, (list, deque)):
            for index in reversed(_keys(enumerate(holder), value)):
                del holder[index]
            yield f"a {type(holder).__name__}"
        elif not isinstance(value, dict):
            for name in _attributes(holder, value):
                setattr(holder, name, None)
                yield f"{type(holder).__name__}.{name}"


def _out_of_dict(holder: dict, value: object, owner: object | None, is_named: bool) -> Iterator[str]:
    """Removes a value from a dict, or sets the attribute of its owner to None if ``is_named``."""
    for key in _keys(holder.items(), value):
        if owner is None or isinstance(owner, FunctionType):
            del holder[key]
            yield f"a dict (key {key!r})" if owner is None else f"{owner.__qualname__}.{key}"
        elif is_named:
            setattr(owner, key, None)
            yield f"{getattr(owner, '__name__', type(owner).__name__)}.{key}"


class _Referrers:
    """What holds objects, except running code and proxies, whose object may be dead.

    The garbage collector walks all objects of the process for each question, so it is asked for many at once.
    """

    def __init__(self, values: list[Any]) -> None:
        self._known: dict[int, list[Any]] = {}
        self._own: dict[int, object] = {}  # lists of this object, by id, which hold what they tell of
        self._ask(values)

    def of(self, value: object) -> list[Any]:
        """Returns what holds a value now."""
        wanted = id(value)
        if wanted not in self._known:
            self._ask([value, *self._next(wanted)])
        return self._kept([h for h in self._known[wanted] if _refers_to(h, wanted)])

    def _next(self, asked: int) -> list[Any]:
        """Returns containers that hold something known, except one: they are the next to be asked about."""
        held_by = itertools.chain.from_iterable(self._known.values())
        found = {id(h): h for h in held_by if isinstance(h, _CONTAINERS)}
        return [h for i, h in found.items() if i not in self._known and i != asked][:_MOST_ASKED]

    def _ask(self, values: list[Any]) -> None:
        self._kept(values)
        found: dict[int, list[Any]] = {id(value): [] for value in values}
        for holder in self._kept(gc.get_referrers(*values)):
            if type(holder) in _LEFT_OUT or id(holder) in self._own:
                continue
            for held in found.keys() & set(map(id, gc.get_referents(holder))):
                found[held].append(holder)
        for held_by in found.values():
            self._kept(held_by)
        self._known |= found

    def _kept(self, own: list[Any]) -> list[Any]:
        self._own[id(own)] = own
        return own


def _keys(items: Iterable[tuple[Any, object]], value: object) -> list[Any]:
    return [key for key, held in items if held is value]


def _refers_to(holder: object, wanted: int) -> bool:
    return wanted in map(id, gc.get_referents(holder))


def _attributes(holder: object, value: object) -> list[str]:
    """Returns the attributes of an object of the user's that are a value.

    CPython names the object and not its ``__dict__`` where the object itself has the values: since 3.13 also
    if something asked for the dict.
    """
    if isinstance(holder, _CONTAINERS) or is_foreign(type(holder)) or not hasattr(holder, "__dict__"):
        return []
    return [name for name, held in vars(holder).items() if held is value]


def _has_a_name(holder: dict, referrers: _Referrers) -> bool:
    """Whether a variable, attribute, closure or default argument holds a dict, or it has an owner."""
    if _owner(holder, referrers) is not None:
        return True
    for outer in referrers.of(holder):
        if isinstance(outer, CellType) or (isinstance(outer, dict) and _owner(outer, referrers) is not None):
            return True
        if isinstance(outer, tuple) and any(isinstance(o, FunctionType) for o in referrers.of(outer)):
            return True
        if _attributes(outer, holder):
            return True
    return False


def _owner(attributes: dict, referrers: _Referrers) -> object | None:
    """Returns the object, class or Python module whose attributes a dict has; None for other dicts."""
    for owner in referrers.of(attributes):
        if isinstance(owner, type):  # its __dict__ is a view of the dict
            if all(vars(owner).get(name) is value for name, value in attributes.items()):
                return owner
        elif getattr(owner, "__dict__", None) is attributes:
            return owner
    return None
