"""`AcceptedSizes`: the sizes of arguments for which a captured graph computes what the model computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .._compat import size_conditions, size_expression

Shapes = tuple[tuple[int, ...], ...]


class AcceptedSizes:
    """The sizes that a captured graph accepts.

    A capture with dynamic sizes follows one way through the model's Python code. It records what it assumes
    of the sizes: numbers, equalities, bounds, and the outcome of each condition (``if x.shape[1] > 50``).
    Another call fits only if all that holds.

    Args:
        graph_module: The graph as it was captured. A later evaluation of its ops may assume more.
        ranges: The bounds of its symbols, see ``ExportedProgram.range_constraints``.
        seen: The sizes of the call that was captured.
    """

    def __init__(self, graph_module: fx.GraphModule, ranges: Mapping[Any, Any], seen: Shapes) -> None:
        vals = [node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")]
        tensors = [val for val in vals if isinstance(val, torch.Tensor)]
        self._seen = seen
        self._patterns = [tuple(map(size_expression, tensor.shape)) for tensor in tensors]
        sizes = [size for tensor in tensors for size in tensor.shape]
        self._conditions = " and ".join([f"({text})" for text in size_conditions(sizes, ranges)]) or "True"
        self._code = compile(self._conditions, "<sizes>", "eval")
        # If a condition cannot be evaluated here, the graph accepts only the sizes of the capture.
        self._can_tell = self._holds(seen)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._patterns}, {self._conditions})"

    def fit(self, shapes: Shapes) -> bool:
        """Whether the graph may run for tensors of these sizes."""
        return shapes == self._seen or (self._can_tell and self._holds(shapes))

    def _holds(self, shapes: Shapes) -> bool:
        bound: dict[str, int] = {}
        derived: list[tuple[str, int]] = []
        pairs = [zip(*both, strict=True) for both in zip(self._patterns, shapes, strict=True)]
        for want, have in itertools.chain.from_iterable(pairs):
            if isinstance(want, int):
                fits = want == have
            elif want.isidentifier():
                # A capture assumes that a dynamic size is neither 0 nor 1.
                fits = have >= 2 and bound.setdefault(want, have) == have
            else:
                derived.append((want, have))
                continue
            if not fits:
                return False
        try:
            return all(_equals(text, have, bound) for text, have in derived) and self._evaluated(bound)
        except (NameError, SyntaxError, ArithmeticError, TypeError):
            return False

    def _evaluated(self, bound: dict[str, int]) -> bool:
        return bool(eval(self._code, {"math": math}, bound))


def _equals(text: str, have: int, bound: dict[str, int]) -> bool:
    """Whether an expression has a value; binds the one symbol in it that is not bound yet.

    Such an expression is ``a * symbol + b``: torch.export takes no other for the size of an argument.
    """
    names = compile(text, "<sizes>", "eval").co_names
    new = [name for name in names if name not in bound and name != "math"]
    if new:
        zero, one = (int(eval(text, {"math": math}, {**bound, new[0]: value})) for value in (0, 1))
        bound[new[0]] = (have - zero) // (one - zero)
    return bool(eval(text, {"math": math}, bound) == have)
