"""`ShadowWeights`: low-precision copies of float32 parameters, refreshed once per update.

The optimizer, checkpoints, clipping and averaging use the float32 parameters (master weights). A graph reads
the copies instead of casting the same parameters in every forward.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter, gt, is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._compat import (
    SET_GRAD_ENABLED,
    data_of,
    has_dispatch_modes,
    new_lock,
    no_selective_checkpoint,
    times_asked,
    times_asked_in_all,
    times_held,
    watch_data,
)
from ..proxy.all_parameters import all_parameters
from ..training.optimizer_steps import tell_after_steps
from ..training.pending_backwards import PendingBackwards
from .empty_copies import empty_copies
from .home import Home
from .writers import Writers

# Names of the inputs of a just-in-time graph that hold low copies.
SHADOW_PREFIX = "amp_shadow_"
# No memory has this address.
_NOWHERE = -1
# Keeps threads from reading a copy during a refresh. One lock for all models, which must stay copyable.
_lock = new_lock()
_Item = TypeVar("_Item")
_version, _shape = attrgetter("_version"), attrgetter("shape")


class _Shadow:
    """One parameter and its copy.

    Attributes:
        memory: The copy's storage, which the copies of other parameters may share.
        others: How often something holds the storage besides the copies in it, as long as nothing reads them.
    """

    __slots__ = ("copy", "master", "memory", "name", "others")
    copy: Tensor
    memory: torch.UntypedStorage
    others: int

    def __init__(self, master: Tensor, name: str):
        self.master, self.name = weakref.ref(master), name
        watch_data(master)


class _State(NamedTuple):
    """What tells that parameters have changed; the lists have an item for each.

    Attributes:
        versions: Version counters.
        addresses: Of their memory.
        asked: How often ``.data`` was asked for.
    """

    versions: list[int]
    addresses: list[int]
    asked: list[int]

    def changed_since(self, other: _State) -> list[int]:
        """Returns the positions of the items that differ."""
        pairs = zip(zip(*self, strict=True), zip(*other, strict=True), strict=True)
        return [i for i, (mine, others) in enumerate(pairs) if mine != others]


class _Columns(NamedTuple):
    """The fields of all shadows; the lists have an item for each, in the order of `_State`.

    Attributes:
        masters: References to the parameters.
        copies: Their copies.
        shapes: The sizes of the copies.
        devices: The CUDA devices of the copies, each once.
        memories: The storages of the copies, each once.
        holders: How often each storage is held as long as nothing reads the copies in it.
    """

    masters: list[Callable[[], Tensor | None]]
    copies: list[Tensor]
    shapes: list[torch.Size]
    devices: list[torch.device]
    memories: list[torch.UntypedStorage]
    holders: list[int]

    @classmethod
    def of(cls, shadows: Iterable[_Shadow]) -> _Columns:
        """Returns the fields of some shadows."""
        shadows = [*shadows]
        copies = [s.copy for s in shadows]
        inside = Counter(id(s.memory) for s in shadows)
        by_memory = {id(s.memory): s for s in shadows}
        return cls(
            [s.master for s in shadows],
            copies,
            [copy.shape for copy in copies],
            [*dict.fromkeys(copy.device for copy in copies if copy.is_cuda)],
            [s.memory for s in by_memory.values()],
            [inside[key] + s.others for key, s in by_memory.items()],
        )


class ShadowWeights(nn.Module):
    """The shadows of one model's parameters; graphs read them as its attributes.

    A shadow is stale when its parameter's version counter or memory moved (``load_state_dict``, averaging,
    edits in place), when its ``.data`` was asked for (a write through it raises no counter), when an
    optimizer of ``torch.optim`` stepped it (fused ones do not raise the counter), and when the model changed
    between training and evaluation (for writes through an older ``.data`` or numpy, which nothing records).
    Until an optimizer of ``torch.optim`` has stepped one of the parameters, the loop may update them by hand
    through an older ``.data``. Then every call after one with gradients refreshes all shadows. So does every
    call if another process may write the parameters (``share_memory``), and every call that is recorded as
    a CUDA graph; after recorded training all calls do.

    A backward reads the values of its forward: while one is pending, a refresh makes new copies and leaves
    the old ones to it.

    Args:
        model: The model, for its training flag.
        low_dtype: The copies' dtype.

    Attributes:
        pending: The compiled calls whose backward may still read copies.
        replaced: How often a copy was replaced.
    """

    _model: Callable[[], nn.Module | None]
    # It has no parameters, and the search for them takes longer than a check of all copies of a small model.
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def __init__(self, model: nn.Module | None, low_dtype: torch.dtype):
        super().__init__()
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._known = _by_id(model) if model is not None else None
        self._home = Home(model)
        self._low_dtype = low_dtype
        self._shadows: dict[int, _Shadow] = {}
        self._columns = _Columns.of(())
        self._seen = _State([], [], [])
        self._numbers = itertools.count()
        self._all_stale = False
        self._asked = -1
        self._stepped = False
        self._are_shared = False
        self._writers = Writers()
        self._mode: bool | None = None
        self.pending = PendingBackwards()
        self.replaced = 0

    __hash__ = object.__hash__

    def accepts(self, value: object) -> bool:
        """Whether a value is a plain float32 parameter whose updates can be detected.

        Parameters that replaced others do not count: ``fully_shard`` gathers new ones for each forward.
        """
        return (
            isinstance(value, nn.Parameter)
            and type(data_of(value)) is Tensor
            and value.dtype == torch.float32
            and not value.is_inference()
            and (self._known is None or self._known.get(id(value), lambda: None)() is value)
        )

    def are_in_place(self) -> bool:
        """Whether the model has the parameters and submodules that it had at conversion, or at `follow`.

        ``torch.func.functional_call`` replaces them for one call, and ``fully_shard`` for every call.
        """
        return self._home.is_same()

    def follow(self) -> None:
        """Takes exchanged modules for the model's own, unless other modules have lent parameters."""
        model = self._model()
        if model is not None and not self._home.is_same() and self._home.has_own_parameters(model):
            self._known, self._home = _by_id(model), Home(model)

    def have_lost(self) -> bool:
        """Whether a parameter that has a copy is gone."""
        return any(master() is None for master in self._columns.masters)

    def drop_lost(self) -> None:
        """Drops the copies of parameters that are gone. No graph that reads them may run."""
        with _lock:
            self._masters()

    def names_of(self, masters: Sequence[Tensor]) -> list[str]:
        """Returns the attributes that hold the shadows of parameters; creates missing ones."""
        with _lock:
            new = {id(master): master for master in masters if not self._has(master)}
            if new:
                self._add([*new.values()])
            return [self._shadows[id(master)].name for master in masters]

    def of(self, master: Tensor) -> Tensor:
        """Returns the shadow of a parameter."""
        copy: Tensor = getattr(self, self.names_of([master])[0])
        return copy

    def refresh(self, only: Collection[int] | None = None) -> None:
        """Copies the parameters whose shadows are stale, all at once.

        Args:
            only: The ids of the copies that the caller reads, if it does not read all. The others stay stale.
        """
        model = self._model()
        mode = model.training if model is not None else None
        with _lock:
            everything = self._writers.wait() or self._all_stale or self._are_shared
            everything = everything or mode is not self._mode
            masters = self._masters()
            now = self._state(masters)
            if masters and (everything or now != self._seen):
                every: Sequence[int] = range(len(masters))
                stale = every if everything else now.changed_since(self._seen)
                if only is not None:
                    stale = self._leave(self._without(only, stale), stale, now)
                self._copy(stale, masters, now)
            # A hand-written update may follow this call. After an interrupted copy all is as before.
            self._all_stale, self._mode = torch.is_grad_enabled() and not self._stepped, mode

    def are_awaited(self) -> bool:
        """Whether a backward may still read copies, or anything else holds their memory.

        Autograd holds views of what an eager call reads. A compiled call has no views of copies.
        """
        if self.pending.are_there():
            return True
        return any(map(gt, times_held(self._columns.memories), self._columns.holders))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns every copy with its parameter."""
        with _lock:
            masters = self._masters()
            return [*zip(self._columns.copies, masters, strict=True)]

    def note_fresh(self, copies: Collection[int]) -> None:
        """Records that a graph has written the copies with these ids, and may have changed all parameters."""
        with _lock:
            self._all_stale = False
            now = self._state(self._masters())
            every = range(len(self._shadows))
            self._leave(self._without(copies, every), every, now)
            self._seen = now
            self._writers.note(self._columns.devices)

    def after_step(self, optimizer: Optimizer, parameters: set[int]) -> None:
        """Called after the step of any optimizer."""
        with _lock:
            if not parameters.isdisjoint(self._shadows):
                self._all_stale = self._stepped = True

    def _without(self, copies: Collection[int], positions: Sequence[int]) -> set[int]:
        """Returns the positions whose copies have other ids."""
        return {i for i in positions if id(self._columns.copies[i]) not in copies}

    def _leave(self, left: set[int], stale: Sequence[int], now: _State) -> Sequence[int]:
        """Lets shadows stay stale in ``now``, which is to be kept; returns the other stale ones."""
        for i in left:
            now.versions[i], now.addresses[i] = self._seen.versions[i], _NOWHERE
        return [i for i in stale if i not in left] if left else stale

    def _has(self, master: Tensor) -> bool:
        shadow = self._shadows.get(id(master))
        return shadow is not None and shadow.master() is master

    def _add(self, new: list[Tensor]) -> None:
        masters = [*self._masters(), *new]
        if not self._shadows:
            tell_after_steps(self)
        shadows = [_Shadow(master, f"weight_{next(self._numbers)}") for master in new]
        self._make(shadows, new)
        self._shadows.update(zip(map(id, new), shadows, strict=True))
        self._columns = _Columns.of(self._shadows.values())
        self._seen = _State(*([*field, *[-1] * len(new)] for field in self._seen))
        self._asked = -1
        now = self._state(masters)
        self._copy(now.changed_since(self._seen), masters, now)

    def _masters(self) -> list[Tensor]:
        """Returns the parameters, one for each shadow; drops the shadows of those that are gone."""
        masters = [master() for master in self._columns.masters]
        if any(map(is_, masters, itertools.repeat(None))):
            kept = [i for i, master in enumerate(masters) if master is not None]
            items = [*self._shadows.items()]
            self._shadows = dict(items[i] for i in kept)
            for (_, shadow), master in zip(items, masters, strict=True):
                if master is None:
                    object.__setattr__(self, shadow.name, None)  # old graphs look for the name
            self._columns = _Columns.of(self._shadows.values())
            self._seen = _State(*([field[i] for i in kept] for field in self._seen))
            masters = [masters[i] for i in kept]
        return masters  # type: ignore[return-value]

    def _state(self, masters: list[Tensor]) -> _State:
        in_all = times_asked_in_all()
        is_asked, self._asked = in_all != self._asked, in_all
        asked = [*map(times_asked, masters)] if is_asked else self._seen.asked
        return _State([*map(_version, masters)], [*map(Tensor.data_ptr, masters)], asked)

    def _copy(self, stale: Sequence[int], masters: list[Tensor], now: _State) -> None:
        """Copies parameters; ``now`` was read before, so that a write by another thread is seen later."""
        sources = _at(stale, masters)
        shapes = [*map(_shape, sources)]
        if now.addresses != self._seen.addresses:
            self._are_shared = any(map(_is_shared, masters)) or _have_one_address(now.addresses)
        is_awaited = bool(stale) and self.are_awaited()
        if is_awaited or now.addresses != self._seen.addresses or shapes != _at(stale, self._columns.shapes):
            self._make_others(stale, sources, is_awaited)
        if stale:
            _write(_at(stale, self._columns.copies), sources)
            self._writers.note(self._columns.devices)
        self._seen = now

    def _make_others(self, stale: Sequence[int], sources: Sequence[Tensor], are_awaited: bool) -> None:
        """Replaces copies of another size or device than their parameters; awaited ones, too."""
        shadows = [*self._shadows.values()]
        pairs = [(shadows[i], master) for i, master in zip(stale, sources, strict=True)]
        other = [
            (s, m) for s, m in pairs if are_awaited or (s.copy.device, s.copy.shape) != (m.device, m.shape)
        ]
        self._make([shadow for shadow, _ in other], [master for _, master in other])
        self.replaced += len(other)
        self._columns = _Columns.of(shadows)

    def _make(self, shadows: Sequence[_Shadow], masters: Sequence[Tensor]) -> None:
        with _plainly():
            copies = empty_copies(masters, self._low_dtype)
        memories = [copy.untyped_storage() for copy in copies]
        inside = Counter(map(id, memories))
        for shadow, copy, memory, held in zip(shadows, copies, memories, times_held(memories), strict=True):
            shadow.copy, shadow.memory, shadow.others = copy, memory, held - inside[id(memory)]
            object.__setattr__(self, shadow.name, copy)


def _is_shared(parameter: Tensor) -> bool:
    """Whether processes share the memory; for other devices torch does not know."""
    return parameter.device.type == "cpu" and parameter.is_shared()


def _have_one_address(addresses: list[int]) -> bool:
    """Whether parameters share memory (``b.data = a.data``): no version of one counts writes to another."""
    with_memory = [*filter(None, addresses)]
    return len({*with_memory}) < len(with_memory)


def _by_id(model: nn.Module) -> dict[int, weakref.ref[nn.Parameter]]:
    return {id(p): weakref.ref(p) for p in all_parameters(model)}


def _at(positions: Sequence[int], items: list[_Item]) -> list[_Item]:
    """Returns the items at ascending positions, without a copy if these are all."""
    return items if len(positions) == len(items) else [items[i] for i in positions]


def _write(targets: list[Tensor], sources: list[Tensor]) -> None:
    if _has_modes():
        with _plainly():
            torch._foreach_copy_(targets, sources)
        return
    gradients = torch.is_grad_enabled()
    SET_GRAD_ENABLED(False)  # ``torch.no_grad()`` does the same in more time
    try:
        torch._foreach_copy_(targets, sources)
    finally:
        SET_GRAD_ENABLED(gradients)


def _plainly() -> contextlib.AbstractContextManager[Any, bool | None]:
    """Returns a context without modes: a copy made under inference mode could not be saved for a backward."""
    if not _has_modes():
        return torch.no_grad()
    stack = contextlib.ExitStack()
    for mode in (torch.inference_mode(False), torch.no_grad(), no_selective_checkpoint()):
        stack.enter_context(mode)
    return stack


def _has_modes() -> bool:
    return torch.is_inference_mode_enabled() or has_dispatch_modes()
