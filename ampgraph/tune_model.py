"""`tune`: a policy that meets an error budget, found by a few runs of the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .convert import convert
from .errors import AmpGraphError, PolicyError
from .numerics.batches import Batch, arguments_of, listable
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
    """Finds the nodes that have to stay float32 to meet an error budget with little traffic.

    The model runs at most eight times over the batches, eagerly and in its current training mode. About eight
    backwards estimate how much rounding each tensor changes the result. A minimum cut over traffic and this
    estimate selects the nodes to keep in float32. Each selection is verified by a run. `tune` returns the
    verified policy with the least traffic, which may not be the global optimum. Weights, buffers, gradients,
    training mode and random state are restored.

    Args:
        model: The model, not yet converted.
        batches: An iterable. A batch is a tuple of positional arguments, a dict of keyword arguments, or a
            tensor (a single argument). The batches and the model's float32 results stay in memory during the
            search.
        budget: The largest allowed error, 0 or more.
        dtype: The low dtype or its name; default: as in `ampgraph.convert`.
        metric: The definition of the error. ``"output"`` (the default): the 2-norm of the difference from
            float32, divided by the 2-norm of the float32 values, the maximum over outputs and batches.
            ``"loss"``: the largest difference of the loss that the model returns. A function: its return
            value; its arguments are two lists with one result per batch, of the converted model and of
            float32.
        level: The level, or a whole policy, to start from. Its rules and guards are kept.
        calibration: Ranges over more batches. Tensors that leave the low range there stay float32.
        progress: Whether to show a progress bar. Default: only if standard error is a terminal.

    Returns:
        A policy with rules for nodes by name; without new rules if the level already meets the budget. A
        model that is converted with this policy, or with a copy that went through JSON, reproduces the
        measured results bit for bit.

    Raises:
        PolicyError: The dtype or the level (O1 and O2 are legal) is not legal.
        CaptureError: The model cannot be captured.
        AmpGraphError: The budget, the metric or a batch is not legal, ``batches`` is empty, or float32
            everywhere does not meet the budget.

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
    """Does the same as `tune`, and returns the measured figures with the policy."""
    limit, error = checked_budget(budget), ResultError(metric)
    if level is None:
        raise PolicyError("tune: level=None; legal: 'O1', 'O2', or a Policy of these.")
    policy = Policy.of(level, dtype)
    check_level(policy)
    if calibration is not None and not isinstance(calibration, Calibration):
        raise AmpGraphError(
            f"tune: calibration must be what ampgraph.calibrate returns, got {type(calibration).__name__}."
        )
    arguments = [
        arguments_of(batch, number, "tune") for number, batch in enumerate(listable(batches, "tune"), 1)
    ]
    if not arguments:
        raise AmpGraphError("tune: batches is empty; expected at least one batch.")
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
            "O3 stores the model's parameters low, so there is no float32 model to compare with."
        )
