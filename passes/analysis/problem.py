"""The problem of placement: each node has a pinned dtype with its reason, or is free under constraints."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch.fx import Node

from .facts import Facts, Operand, OperandRule
from .precision import FP32, Precision


class Hazard(NamedTuple):
    """Why rounding would spoil a node.

    Attributes:
        reason: In words.
        because: The node that causes the hazard: it reads the value, or feeds it.
        fed_low: Whether it must stay as it is although what it reads may be low.
    """

    reason: str
    because: Node | None = None
    fed_low: bool = False


@dataclass(slots=True)
class Variable:
    """One node's label, pinned to a precision or free (None), with the reason.

    Attributes:
        follows: Low only if all floating producers are low.
        narrowable: Whether every consumer is low anyway, so that it need not follow.
        because: The node whose pin is the reason.
    """

    pinned: Precision | None
    by: str
    reason: str
    follows: bool = False
    because: Node | None = None
    narrowable: bool = False


@dataclass
class Problem:
    """Every managed op's variable, all uses of every managed tensor, and the tensors out of the low range."""

    variables: dict[Node, Variable]
    facts: Facts
    low_dtype: torch.dtype
    uses: dict[Node, list[tuple[Node, int]]] = field(default_factory=dict)
    out_of_range: dict[Node, str] = field(default_factory=dict)

    def source_precision(self, tensor: Node) -> Precision:
        """Returns the precision that ``tensor`` has in the source."""
        return Precision.of(self.facts[tensor].dtype, self.low_dtype)

    def width_read(self, node: Node, operand: Operand) -> Node | Precision:
        """Returns whose label is the dtype in which a node reads an operand, or the dtype."""
        if operand.rule is OperandRule.SOURCE_DTYPE:
            return self.source_precision(operand.tensor)
        if operand.rule is OperandRule.NODE_DTYPE:
            return node
        return self.facts[operand.tensor].dtype_source

    @cached_property
    def reads(self) -> list[tuple[Node, Operand, Node]]:
        """Each operand whose dtype matters, with the node that reads it and the node whose label it has."""
        facts = self.facts
        reads = ((node, operand) for node, fact in facts.items() for operand in fact.operands)
        return [(n, o, facts[o.tensor].dtype_source) for n, o in reads if o.rule is not OperandRule.EITHER]

    @cached_property
    def moved(self) -> dict[Node | Precision, int]:
        """The elements that ops read and write, by whose label sets their width, or by the width itself."""
        found: dict[Node | Precision, int] = defaultdict(int)
        for node, fact in self.facts.items():
            if not fact.moves_data:
                continue
            if fact.dtype is not None:
                found[fact.dtype_source] += fact.elements
            for operand in fact.operands:
                found[self.width_read(node, operand)] += self.facts[operand.tensor].elements
        return found

    @cached_property
    def promoted(self) -> dict[Node, list[Node]]:
        """The tensors that decide the dtype of a result, for each op that promotes."""
        found: dict[Node, dict[Node, None]] = {}
        for node in self.variables:
            for operand in self.facts[node].operands:
                if operand.rule is OperandRule.PROMOTED:
                    found.setdefault(node, {})[operand.tensor] = None
        return {node: list(tensors) for node, tensors in found.items()}

    def pin(self, tensor: Node) -> Precision | None:
        """Returns the pinned label of the node that produces ``tensor``."""
        return self.variables[self.facts[tensor].dtype_source].pinned


def force_followers(problem: Problem) -> None:
    """Pins, in graph order, every follower of a float32 value."""
    for node, variable in problem.variables.items():
        if variable.pinned is not None or not variable.follows:
            continue
        for slot in problem.facts[node].operands:
            if slot.follow and problem.pin(slot.tensor) is FP32:
                variable.pinned, variable.by, variable.because = FP32, "propagation", slot.tensor
                variable.reason = f"{variable.reason}: follows {slot.tensor.name!r}, which is float32"
                break
