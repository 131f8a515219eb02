"""`tune`: a policy that meets an error budget, found by a few runs of the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .convert import convert
from .errors import AmpGraphError, PolicyError
from .numerics.batches import Batch, arguments_of
from .numerics.calibration import Calibration
from .policy.policy import Policy
from .tuning.result_error import Metric, ResultError, checked_budget
from .tuning.tuner import Tuned, Tuner


def tune(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    budget: float,
    dtype: torch.dtype | str | None = None,
    metric: Metric | str | None = None,
    level: str | Policy = "O2",
    calibration: Calibration | None = None,
    progress: bool | None = None,
) -> Policy:
    """Finds by measurement what has to stay float32, so that an error budget is met at little traffic.

    The model runs at most eight times over the batches, and some eight backwards show how much rounding each
    tensor changes the result. Nodes to keep float32 are chosen by a minimum cut that prices traffic and this
    error together. The priced error is an estimate, so each choice is verified by running it. Of the verified
    choices the one with the least traffic is returned; it may not be the best of all. The model stays as it
    was: weights, buffers, gradients, training mode and random numbers. It runs eagerly, in its current
    training mode.

    Args:
        model: The model, not yet converted.
        batches: Tuples of positional arguments, dicts of keyword arguments, or tensors, the only argument.
            They are kept, with the model's float32 results, while tuning.
        budget: The error that is allowed, at least 0.
        dtype: The low dtype or its name; default: as in `ampgraph.convert`.
        metric: What the error is. ``"output"`` (None): the 2-norm of the difference from float32 over that of
            the float32 values, of the output and batch where it is largest. ``"loss"``: the largest
            difference of the loss that the model returns. A function of two lists, what the converted model
            and what the float32 model returned for each batch: the number that it returns.
        level: The level, or a whole policy, to start from. Its rules and guards are kept.
        calibration: Ranges over more batches. Tensors that leave the low range there stay float32.
        progress: Whether to show a progress bar. Default: where standard error is a terminal.

    Returns:
        An ordinary policy with rules for nodes by name. It has no more rules than the given one if that meets
        the budget already. Converting the same model with it, with or without `Policy.to_json` in between,
        gives what was measured, bit for bit.

    Raises:
        PolicyError: The dtype or the level (O1 and O2 are legal) is not legal.
        CaptureError: The model cannot be captured.
        AmpGraphError: The budget, the metric or a batch is not legal, there is no batch, or not even float32
            everywhere meets the budget.

    Example:
        >>> policy = ampgraph.tune(model, [(x,)], dtype=torch.float16, budget=1e-3)
        >>> amp = ampgraph.convert(model, (x,), policy=policy)
    """
    return tuned(model, batches, budget, dtype, metric, level, calibration, progress).policy


def tuned(
    model: nn.Module,
    batches: Iterable[Batch],
    budget: float,
    dtype: torch.dtype | str | None = None,
    metric: Metric | str | None = None,
    level: str | Policy = "O2",
    calibration: Calibration | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Does what `tune` does, and tells what it measured."""
    limit, error = checked_budget(budget), ResultError(metric)
    policy = Policy.of(level, dtype)
    check_level(policy)
    if calibration is not None and not isinstance(calibration, Calibration):
        raise AmpGraphError(
            f"tune: calibration must be what ampgraph.calibrate returns, got {type(calibration).__name__}."
        )
    arguments = [arguments_of(batch, number, "tune") for number, batch in enumerate(_listed(batches), 1)]
    if not arguments:
        raise AmpGraphError("tune: there is no batch.")
    args, kwargs = arguments[0]
    amp = convert(model, args, kwargs, policy=policy, backend="eager")
    return Tuner(amp, arguments, limit, error, calibration).run(progress)


def check_level(policy: Policy) -> None:
    """Checks that a level can be tuned.

    Raises:
        PolicyError: O0 changes nothing, and O3 replaces the model's parameters.
    """
    if policy.level not in ("O1", "O2"):
        raise PolicyError(
            f"tune: level={policy.level!r}; legal: 'O1', 'O2', or a Policy of these. O0 changes nothing, and "
            "O3 stores the model's parameters low, so float32 is no more to be measured."
        )


def _listed(batches: Iterable[Batch]) -> list[Batch]:
    if isinstance(batches, (torch.Tensor, dict, str)) or not isinstance(batches, Iterable):
        raise AmpGraphError(
            f"tune: batches is a {type(batches).__name__}; expected an iterable of batches, such as [(x,)]."
        )
    return list(batches)
