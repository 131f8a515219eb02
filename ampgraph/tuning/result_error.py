"""The error of a converted model's results, as `tune` measures it, and the check of the budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import AmpGraphError, did_you_mean

# Takes what the converted model returned for each batch, and what float32 did; returns the error.
Metric = Callable[[list[Any], list[Any]], Any]
OUTPUT, LOSS = NAMES = ("output", "loss")


class ResultError:
    """Tells how far results are from float32's.

    Args:
        metric: ``"output"`` (None), ``"loss"`` or a function.

    Raises:
        AmpGraphError: It is something else.
    """

    def __init__(self, metric: Metric | str | None):
        if metric is not None and metric not in NAMES and not callable(metric):
            hint = did_you_mean(metric, NAMES) if isinstance(metric, str) else ""
            raise AmpGraphError(
                f"tune: metric={metric!r}; legal: 'output' (the relative error of outputs, the default), "
                "'loss' (the difference of the loss that the model returns), or a function of two lists: "
                f"the results of the converted model and of float32, by batch.{hint}"
            )
        self._metric = metric if callable(metric) else None
        self._of_loss = metric == LOSS

    def of(self, results: list[Any], references: list[Any]) -> float:
        """Returns the error; infinite where something is not finite that is finite in float32."""
        if self._metric is None:
            return max(max(pair) for pair in self.parts(results, references))
        error = self._metric(results, references)
        if isinstance(error, Tensor) and error.numel() == 1:
            error = error.item()
        if not isinstance(error, Real):
            raise AmpGraphError(f"tune: metric returned a {type(error).__name__}; expected a number.")
        return math.inf if math.isnan(error) else float(error)

    def parts(self, results: list[Any], references: list[Any]) -> list[list[float]]:
        """Returns the error of each floating-point output that counts, by batch."""
        return [
            [self._distance(a, b) for a, b in zip(self.counted(x), self.counted(y), strict=True)]
            for x, y in zip(results, references, strict=True)
        ]

    def counted(self, result: Any) -> list[Tensor]:
        """Returns the tensors of a result whose error counts.

        Raises:
            AmpGraphError: There is no floating-point output.
        """
        if self._of_loss:
            return [_loss_of(result)]
        found = [v for v in leaves(result) if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
        if not found:
            raise AmpGraphError(
                f"tune: the model returns no floating-point tensor, but a {type(result).__name__}; "
                "tune a model that returns the values before they become integers."
            )
        return found

    def _distance(self, found: Tensor, true: Tensor) -> float:
        found, true = found.detach().double(), true.detach().double()
        finite = true.isfinite()
        if not torch.equal(found.isfinite(), finite):
            return math.inf
        difference = float((found - true).masked_fill(~finite, 0).norm())
        norm = float(true.masked_fill(~finite, 0).norm())
        if self._of_loss or difference == 0:
            return difference
        return difference / norm if norm else math.inf


def leaves(result: Any) -> list[Any]:
    """Returns what a model's result holds; dataclasses that pytree does not know are opened."""
    found = []
    for leaf in pytree.tree_leaves(result):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += [v for f in dataclasses.fields(leaf) for v in leaves(getattr(leaf, f.name))]
        else:
            found.append(leaf)
    return found


def _loss_of(result: Any) -> Tensor:
    """Returns the loss in what a model returns: the result itself, its ``loss``, or its first output."""
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    first = result[0] if isinstance(result, Sequence) and len(result) else None
    for value in (result, named, first):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1:
            return value
    raise AmpGraphError(
        f"tune: metric='loss', and the model returns no loss but a {type(result).__name__}: expected one "
        "number, a result with a 'loss', or a tuple that begins with one."
    )


def checked_budget(budget: object) -> float:
    """Returns the budget as a number.

    Raises:
        AmpGraphError: It is not a number, or it is negative or infinite.
    """
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 <= float(budget) < math.inf:
        raise AmpGraphError(
            f"tune: budget={budget!r}; expected a finite number of 0 or more, the largest allowed error."
        )
    return float(budget)
