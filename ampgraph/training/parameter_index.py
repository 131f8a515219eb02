"""Maps parameters to elements of the probe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .._compat import without_wrappers
from ..proxy.all_parameters import all_parameters


class ParameterIndex:
    """Slots by parameter name, found by parameter object.

    Some tools replace parameter objects but keep their names: FSDP2 (shards at rest, whole tensors during a
    forward), ``to_empty``, ``load_state_dict(assign=True)`` and ``torch.func.functional_call``. Wrappers that
    come later (``checkpoint_wrapper``, ``torch.compile``) change no name. The index keeps no parameter alive.

    Attributes:
        names: The parameters' names, by slot.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self.names = [without_wrappers(name) for name, _ in nn.Module.named_parameters(model)]
        slots = {id(p): slot for slot, p in enumerate(all_parameters(model))}
        named = nn.Module.named_parameters(model, remove_duplicate=False)
        self._by_name = {without_wrappers(name): slots[id(p)] for name, p in named}
        self.refresh()

    def refresh(self) -> None:
        """Looks up the parameter objects that the model has now."""
        self._by_parameter = WeakIdKeyDictionary()
        for name, parameter in nn.Module.named_parameters(self._model, remove_duplicate=False):
            if (slot := self._by_name.get(without_wrappers(name))) is not None:
                self._by_parameter[parameter] = slot

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_by_parameter": None}  # weak references: neither copied nor pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _by_parameter=WeakIdKeyDictionary())

    def items(self) -> Iterator[tuple[Tensor, int]]:
        """Yields each parameter that has a slot, with its slot."""
        yield from self._by_parameter.items()

    def known(self, parameter: Tensor) -> int | None:
        """Returns the slot of a parameter from an earlier look-up; None for any other tensor."""
        return self._by_parameter.get(parameter)

    def of(self, parameters: Iterable[Tensor]) -> list[int | None]:
        """Returns the slot of each tensor; None for a tensor that is not a parameter of the model."""
        parameters = list(parameters)
        if any(p not in self._by_parameter for p in parameters):
            self.refresh()
        return [self._by_parameter.get(p) for p in parameters]
