"""Maps parameters to elements of the probe."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .._compat import may_be_swapped, without_wrappers
from ..proxy.all_parameters import all_parameters
from .distributed import is_distributed

# Parameters with their slots; None for a tensor that is no parameter of the model.
Slotted = list[tuple[Tensor, int | None]]


class ParameterIndex:
    """Slots by parameter name, found by parameter object.

    Some tools replace parameter objects but keep their names: FSDP2 (shards at rest, whole tensors during a
    forward), ``to_empty``, ``load_state_dict(assign=True)`` and ``torch.func.functional_call``. Wrappers that
    come later (``checkpoint_wrapper``, ``torch.compile``) change no name. The index keeps no parameter alive.

    Attributes:
        names: The parameters' names, by slot.
    """

    _by_parameter: dict[int, tuple[weakref.ref[Tensor], int]]
    _met: WeakIdKeyDictionary
    _subclasses: dict[int, tuple[Tensor, int]]

    def __init__(self, model: nn.Module):
        self._model = model
        self._met = WeakIdKeyDictionary()
        self.names = [without_wrappers(name) for name, _ in nn.Module.named_parameters(model)]
        slots = {id(p): slot for slot, p in enumerate(all_parameters(model))}
        named = nn.Module.named_parameters(model, remove_duplicate=False)
        self._by_name = {without_wrappers(name): slots[id(p)] for name, p in named}
        self.refresh()

    def refresh(self) -> None:
        """Looks up the parameter objects that the model has now."""
        self._by_parameter, self._subclasses = {}, {}
        for name, parameter in nn.Module.named_parameters(self._model, remove_duplicate=False):
            if (slot := self._by_name.get(without_wrappers(name))) is None:
                continue
            if may_be_swapped(parameter):
                self._subclasses[id(parameter)] = parameter, slot
            else:
                self._by_parameter[id(parameter)] = weakref.ref(parameter), slot

    def __getstate__(self) -> dict[str, Any]:
        # Weak references are neither copied nor pickled.
        return {**vars(self), "_by_parameter": None, "_met": None, "_subclasses": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _by_parameter={}, _met=WeakIdKeyDictionary(), _subclasses={})

    def items(self) -> Iterator[tuple[Tensor, int]]:
        """Yields each parameter that has a slot, with its slot; not results in the place of some."""
        for reference, slot in [*self._by_parameter.values()]:
            if (parameter := reference()) is not None and parameter.is_leaf:
                yield parameter, slot
        yield from self._subclasses.values()

    def known(self, parameter: Tensor) -> int | None:
        """Returns the slot of a parameter from an earlier look-up; None for any other tensor."""
        key = id(parameter)
        if (known := self._by_parameter.get(key)) is not None and known[0]() is parameter:
            return known[1]
        found = self._subclasses.get(key)
        return None if found is None else found[1]

    def is_of_model(self, parameter: Tensor) -> bool:
        """Whether the model has the parameter now, also one that came later and has no slot."""
        return any(own is parameter for own in all_parameters(self._model))

    def at_end_of_backward(self, leaf: Tensor) -> int | None:
        """Returns the slot of a leaf of autograd's graph; FSDP2 shows the one of each block in turn."""
        slot = self.known(leaf)
        if slot is not None or not is_distributed():
            return slot
        if leaf not in self._met:
            self._met[leaf] = self.of([leaf])[0]
        return self._met[leaf]

    def slotted(self, parameters: Sequence[Tensor]) -> Slotted:
        """Returns the tensors with their slots."""
        return list(zip(parameters, self.of(parameters), strict=True))

    def of(self, parameters: Iterable[Tensor]) -> list[int | None]:
        """Returns the slot of each tensor; None for a tensor that is not a parameter of the model."""
        parameters = list(parameters)
        by_parameter = self._by_parameter
        found = [by_parameter.get(id(p)) for p in parameters]
        if all(k is not None and k[0]() is p for k, p in zip(found, parameters, strict=True)):
            return [k[1] for k in found]  # type: ignore[index]
        slots = [self.known(p) for p in parameters]
        if None not in slots:
            return slots
        self.refresh()
        return [self.known(p) for p in parameters]
