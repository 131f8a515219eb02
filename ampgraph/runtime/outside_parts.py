"""`OutsideParts`: the parts of modules that forward uses and that are no parts of the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..proxy.all_parameters import all_parameters
from .module_structure import Structure


class OutsideParts:
    """What a graph depends on of the modules that its capture found outside of the model.

    A graph reads their parameters where they are. It depends on their layers, hooks and forwards, and on the
    kinds of their tensors. It also depends on which of these require gradients: a capture loses those. It
    reads a parameter that the model has, too, in the model. Their attributes and modes count only if forward
    reads them.

    Args:
        modules: The modules.
        source: The model.
    """

    def __init__(self, modules: Iterable[nn.Module], source: nn.Module) -> None:
        self._structure = Structure(modules, counts_data=True)
        self._kinds, self._trained = self._structure.tensors.kinds(), self._trained_now()
        own = set(map(id, all_parameters(source)))
        tables = [module._parameters for module in self._structure.modules]
        self._tied = [(table, name, p) for table in tables for name, p in table.items() if id(p) in own]

    def are_same(self) -> bool:
        """Whether the modules have the parts that they had. Runs at every call."""
        flags = self._structure.flags()
        if flags is None or flags[1] is not self._kinds:
            return False
        if not all(table.get(name) is parameter for table, name, parameter in self._tied):
            return False
        return not torch.is_grad_enabled() or self._trained_now() == self._trained

    def _trained_now(self) -> list[bool]:
        return [tensor.requires_grad for tensor in self._structure.tensors.now()]
