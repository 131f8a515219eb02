"""What a model asks for during a capture, beside attributes: gradients, strides, the modules themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from .._compat import HigherOrderOperator, OpOverload
from ..own_files import is_pythons
from .user_code import is_asked_by_model

_AUTOGRAD_NAMES = ("requires_grad", "grad_fn", "is_leaf")
_LAYOUT_NAMES = ("is_contiguous", "stride", "dim_order", "is_conj", "is_neg")
_OF_AUTOGRAD = frozenset(getattr(torch.Tensor, name).__get__ for name in _AUTOGRAD_NAMES)
_OF_LAYOUT = frozenset(
    {*(getattr(torch.Tensor, name) for name in _LAYOUT_NAMES), torch.is_conj, torch.is_neg}
)
# Strides decide whether these ops copy, and so whether a later write reaches the argument.
_COPY_OR_NOT = frozenset(
    f
    for name in ("contiguous", "reshape", "reshape_as", "flatten", "ravel", "to")
    for f in (getattr(torch.Tensor, name), getattr(torch, name, None))
    if f is not None
)
# The calls that `Questions.note_call` looks at.
STATE_READERS = _OF_AUTOGRAD | _OF_LAYOUT | _COPY_OR_NOT | {torch.Tensor.storage_offset}


class Questions:
    """What a model's code asks for during a capture.

    Attributes:
        for_gradients: Whether it asks for the grad mode, or for a tensor's ``requires_grad``.
        for_layout: Whether it asks for strides, or for a conjugate or negative bit, or writes in place to
            what may be a copy or not.
        for_offset: Whether it asks where in its memory a tensor begins.
        for_itself: Whether it asks for the dict or the hash of a module, which show more than attributes.
    """

    def __init__(self) -> None:
        self.for_gradients = self.for_layout = self.for_offset = self.for_itself = False
        self._may_copy = False

    def note_itself(self) -> bool:
        """Records that the model's code asks for the dict of a module, or its hash (a table by modules).

        Returns:
            Whether it is the model's code that asks.
        """
        frame = sys._getframe(2)
        while is_pythons(frame.f_code.co_filename) and frame.f_back:  # a WeakKeyDictionary
            frame = frame.f_back
        is_asked = is_asked_by_model(frame)
        self.for_itself = self.for_itself or is_asked
        return is_asked

    def note_gradients(self) -> None:
        """Records a read of grad mode by the model's code; torch's layers read it only to choose a kernel."""
        self.for_gradients |= is_asked_by_model(sys._getframe(2))

    def note_call(self, function: Any) -> None:
        """Records the state that a tensor function or getter returns to the model's code."""
        caller = sys._getframe(2)
        if function in _OF_AUTOGRAD:
            self.for_gradients |= is_asked_by_model(caller, function)
        elif function in _OF_LAYOUT:
            self.for_layout |= is_asked_by_model(caller, function)
        elif function == torch.Tensor.storage_offset:
            self.for_offset |= is_asked_by_model(caller, function)
        elif function in _COPY_OR_NOT:
            self._may_copy |= is_asked_by_model(caller, function)

    def note_program(self, program: ExportedProgram, names: Set[str]) -> None:
        """Records the in-place writes that the captured graph shows, and what its branches may ask for."""
        if _has_branches(program):
            self.for_gradients |= not names.isdisjoint(_AUTOGRAD_NAMES)
            self.for_layout |= not names.isdisjoint(_LAYOUT_NAMES)
            self.for_offset |= "storage_offset" in names
        self.for_layout |= self.for_offset or (self._may_copy and any(_written(program)))


def _has_branches(program: ExportedProgram) -> bool:
    """Whether Dynamo has captured code (a branch of ``torch.cond``, a loop), whose questions no mode sees."""
    operators = (
        node.target
        for part in program.graph_module.modules()
        for node in (part.graph.nodes if isinstance(part, fx.GraphModule) else ())
        if isinstance(node.target, HigherOrderOperator)
    )
    return any(not operator.name().startswith("wrap_") for operator in operators)


def _written(program: ExportedProgram) -> Iterator[fx.Node]:
    """Yields the nodes that a graph writes in place, except its buffers."""
    buffers = program.graph_signature.inputs_to_buffers
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            is_write = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
            if is_write and node.all_input_nodes and node.all_input_nodes[0].name not in buffers:
                yield node.all_input_nodes[0]
