"""What a `Calibration` says of a model: which nodes must stay float32, whatever one batch shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from ..errors import AmpGraphError, PolicyError
from ..module import AmpModule
from ..passes.analysis.unwritten import unwritten
from ..policy.policy import Policy
from ..report.graph_view import is_item
from ..runtime.run_graph import GraphRun, floats
from .calibration import Calibration
from .neighbours import Neighbours
from .remedy import merged
from .run_model import ModelRunner, Part

# Rounds of planning until no node is low that makes or reads a value out of range.
ROUNDS = 8


def checked(calibration: object, who: str) -> Calibration | None:
    """Returns the calibration.

    Raises:
        PolicyError: It is something else.
    """
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    raise PolicyError(
        f"{who}: calibration must be what ampgraph.calibrate or Calibration.load returns, got "
        f"{type(calibration).__name__}."
    )


def wide(calibration: Calibration, part: Part, near: Neighbours, low_dtype: torch.dtype) -> dict[Node, float]:
    """Returns the tensors of a graph that left the low range in a batch, in graph order, with their peaks.

    Raises:
        AmpGraphError: The calibration has not seen this graph, or not all of its values.
    """
    rows, most = calibration.of(part.float32).values, torch.finfo(low_dtype).max
    left_out = unwritten(part.float32.graph)
    nodes = (n for n in near.nodes.values() if not is_item(n) and n not in left_out)
    measured = {n.name for n in nodes if floats(n.meta.get("val"))}
    if other := sorted(measured ^ rows.keys()):
        raise AmpGraphError(
            f"the calibration of {calibration.model} was changed: it has other values than its graph has, "
            f"{other[0]} for example; calibrate again."
        )
    peaks = {node: rows[name].peak for name, node in near.nodes.items() if name in rows}
    return {node: peak for node, peak in peaks.items() if peak > most}


def pins_for(tensors: Mapping[Node, float], part: Part, near: Neighbours, policy: Policy) -> frozenset[str]:
    """Returns the nodes that make or read these tensors, and would run low under the policy."""
    pins: set[str] = set()
    for _ in range(ROUNDS):
        rules = merged(policy, sorted(pins), near.nodes, part.modules)
        plan = part.under(policy.replace(rules=rules))[1] if pins else part.plan
        more = near.around(tensors, plan) - pins
        if not more:
            break
        pins |= more
    return frozenset(pins)


def policy_for(amp: AmpModule, calibration: Calibration, args: tuple, kwargs: Mapping[str, Any]) -> Policy:
    """Returns the model's policy, with rules for what left the low range in a batch.

    Raises:
        AmpGraphError: The calibration has not seen the graph of these arguments.
    """
    runner = ModelRunner(amp, args, kwargs)
    runner(_plainly)
    pins: set[str] = set()
    names: set[str] = set()
    for part in runner.parts:
        near = Neighbours(part)
        tensors = wide(calibration, part, near, amp.options.low_dtype)
        pins |= pins_for(tensors, part, near, amp.policy)
        names |= near.nodes.keys()
    if not pins:
        return amp.policy
    return amp.policy.replace(rules=merged(amp.policy, sorted(pins), names, runner.modules))


def _plainly(part: Part, inputs: list[Any]) -> Any:
    run = GraphRun(part.float32, inputs)
    for _ in run:
        pass
    return run.outputs
