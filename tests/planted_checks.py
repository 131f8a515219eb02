"""Plants faults and holds `check_numerics` to what other code sees: an interpreter, and a training loop."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

import ampgraph
from ampgraph import Policy
from ampgraph.numerics.observe import Observer
from ampgraph.numerics.remedy import Trials
from ampgraph.numerics.run_model import ModelRunner
from ampgraph.report.replan import without_casts
from ampgraph.runtime.run_graph import Draws, flat_inputs

from .planted_models import MODELS, Host, backward_fault, forward_fault

# More subsets than this are not tried for the least remedy.
MOST_SUBSETS = 1500


@dataclass
class Outcome:
    """What became of one fault.

    Attributes:
        model: The class of the model.
        fault: What was planted.
        level: The policy's level.
        named: Whether the finding names the node that other code sees first.
        cured: Whether the remedy, converted and run by other code, leaves all finite; or the scale is right.
        kind: ``"remedy"`` or ``"settles"``.
        pinned: How many nodes the remedy pins.
        least: The least number that cures, where every smaller set was tried; else None.
        detail: What went wrong.
    """

    model: str
    fault: str
    level: str
    named: bool
    cured: bool
    kind: str
    pinned: int = 0
    least: int | None = None
    detail: str = ""


class _Counting(Interpreter):
    """Counts what is not finite at each node; torch's interpreter, none of ampgraph's."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.bad: dict[str, int] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            self.bad[n.name] = int((~value.isfinite()).sum())
        return value


def bad_nodes(amp: ampgraph.AmpModule, x: Tensor) -> list[str]:
    """The nodes that are less finite than in float32, in order; casts count for what they cast."""
    graphs = amp.graph_module, without_casts(amp.graph_module, amp.plan)
    counts = []
    with torch.no_grad():
        for graph_module in graphs:
            interpreter = _Counting(graph_module)
            interpreter.run(*flat_inputs(graph_module, (x.clone(),)), enable_io_processing=False)
            counts.append(interpreter.bad)
    nodes = {node.name: node for node in amp.graph_module.graph.nodes}
    found = []
    for name, count in counts[0].items():
        own = name
        while own not in counts[1]:
            own = nodes[own].args[0].name
        if count > counts[1][own]:
            found.append(own)
    return found


class _Hooked(Interpreter):
    """Keeps the nodes whose results get gradients that are not finite, in the order of the backward."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.bad: list[Node] = []

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.requires_grad and n.op == "call_function":
            value.register_hook(lambda g: None if g.isfinite().all() else self.bad.append(n))
        return value


def blamed_by_hooks(
    amp: ampgraph.AmpModule, x: Tensor, loss: Callable[[Tensor], Tensor], scale: float
) -> set[str]:
    """The nodes that may have made the first bad gradient at this scale: its readers, or its maker."""
    amp.scaler.update(scale)
    graph_module = amp.training_graph
    interpreter = _Hooked(graph_module)
    (result,) = interpreter.run(*flat_inputs(graph_module, (x.clone(),)), enable_io_processing=False)
    loss(result).backward()
    first = _first_made(interpreter.bad, amp)
    names = {n.name for n in (first, *first.all_input_nodes[:1]) if n.name in amp.plan.decisions}
    return names | {reader.name for reader in _readers(first, amp) if reader.op != "output"}


def _first_made(bad: list[Node], amp: ampgraph.AmpModule) -> Node:
    """The tensor with a bad gradient, none of whose readers has one, that is read last in the graph.

    Of several readers of one tensor the first counts: the others may have been fine. The order of hooks does
    not tell: a gradient of a low copy is seen when those of all copies are there.
    """
    place = {node: index for index, node in enumerate(bad[0].graph.nodes)}
    readers = {n: _readers(n, amp) for n in bad}
    made = [n for n in bad if readers[n] and not any(r in bad for r in readers[n])]
    return max(made or bad, key=lambda n: min((place[r] for r in readers[n]), default=-1))


def _readers(node: Node, amp: ampgraph.AmpModule) -> list[Node]:
    """The model's own nodes that read a tensor, through casts and the boundary, and the output."""
    found, waiting = [], list(node.users)
    while waiting:
        user = waiting.pop()
        if user.name in amp.plan.decisions or user.op == "output":
            found.append(user)
        else:
            waiting += user.users
    return found


def scale_of_loop(amp: ampgraph.AmpModule, x: Tensor, loss: Callable[[Tensor], Tensor]) -> float | None:
    """The scale at which a training loop takes its first step; None where it takes none."""
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.0)
    amp.scaler.attach(optimizer)
    for _ in range(30):
        optimizer.zero_grad()
        loss(amp(x.clone())).backward()
        scale = amp.scaler.get_scale()
        if all(p.grad is None or p.grad.isfinite().all() for p in amp.parameters()):
            return scale
        optimizer.step()
        if amp.scaler.get_scale() == scale:
            return None
    return None


def planted(seed: int, backward: bool) -> tuple[Host, Tensor, str, str]:
    """Returns a model with a fault, an input, the fault's name and a level."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = MODELS[seed % len(MODELS)]().eval()
    name, fault = (backward_fault if backward else forward_fault)(rng)
    if not backward and rng.random() < 0.2:
        name = "weight"
        weight = rng.choice([p for p in model.parameters() if p.dim() > 1])
        with torch.no_grad():
            weight.mul_(10 ** rng.uniform(5, 7))
    else:
        model.faults[rng.randrange(model.places)] = fault
    return model, torch.randn(model.size), name, rng.choice(["O1", "O2"])


def converted(model: nn.Module, x: Tensor, policy: Policy) -> ampgraph.AmpModule:
    return ampgraph.convert(model, (x,), policy=policy, backend="eager", capture="ahead of time")


def forward_outcome(seed: int, count_least: bool = True) -> Outcome | None:
    """Plants one fault in a forward; None where float16 stands it, or float32 does not."""
    model, x, name, level = planted(seed, backward=False)
    with torch.no_grad():
        if not model(x).isfinite().all():
            return None
    amp = converted(model, x, Policy(level=level, dtype=torch.float16, hazards=False))
    bad = bad_nodes(amp, x)
    found = ampgraph.check_numerics(amp, (x,))
    if not bad:
        assert found is None or found.in_float32, f"seed {seed}: false alarm\n{found}"
        return None
    outcome = Outcome(type(model).__name__, name, level, False, False, "remedy")
    if found is None:
        outcome.detail = f"seed {seed}: nothing found, but {bad[0]}"
        return outcome
    outcome.named = found.node == bad[0]
    outcome.pinned = len(found.pinned)
    if found.remedy:
        again = converted(model, x, amp.policy.replace(rules=found.remedy))
        outcome.cured = not bad_nodes(again, x)
    if not (outcome.named and outcome.cured):
        outcome.detail = f"seed {seed}: {bad[0]} first\n{found}"
    elif count_least:
        outcome.least = least_remedy(amp, x, found.pinned)
    return outcome


def least_remedy(amp: ampgraph.AmpModule, x: Tensor, pinned: tuple[str, ...]) -> int | None:
    """Tries every smaller set of nodes; None where there are too many."""
    low = [
        n for n, d in amp.plan.decisions.items() if d.dtype is torch.float16 and d.by in ("list", "placement")
    ]
    if sum(math.comb(len(low), k) for k in range(1, len(pinned))) > MOST_SUBSETS:
        return None
    model, draws = ModelRunner(amp, (x,)), Draws()
    reference = Observer(model, lambda part: part.float32, None, None, draws).run()
    trials = Trials(model, reference, None, None, draws)
    for size in range(1, len(pinned)):
        if any(not trials.run(pins).bad for pins in itertools.combinations(low, size)):
            return size
    return len(pinned)


def backward_outcome(seed: int) -> Outcome | None:
    """Plants one fault in a backward; None where the first scale, or no scale in float32, is fine."""
    model, x, name, level = planted(seed, backward=True)
    factor = 10 ** random.Random(-seed).uniform(-1, 2)

    def loss(y: Tensor) -> Tensor:
        return y.square().mean() * factor

    policy = Policy(level=level, dtype=torch.float16, hazards=False)
    amp = converted(model, x, policy)
    if bad_nodes(amp, x):
        return None
    scale = scale_of_loop(converted(model, x, policy), x, loss)
    found = ampgraph.check_numerics(amp, (x,), loss=loss)
    if found is not None and found.in_float32:
        return None
    if scale == amp.scaler.get_scale():
        assert found is None, f"seed {seed}: false alarm\n{found}"
        return None
    outcome = Outcome(type(model).__name__, name, level, False, False, "remedy")
    if found is None:
        outcome.detail = f"seed {seed}: nothing found; the loop settles at {scale}"
        return outcome
    at = amp.scaler.get_scale() if found.settles_at is not None else found.least_scale
    outcome.named = found.node in blamed_by_hooks(amp, x, loss, at)
    outcome.pinned = len(found.pinned)
    if found.settles_at is not None:
        outcome.kind = "settles"
        outcome.cured = scale == found.settles_at
    elif found.remedy:
        again = scale_of_loop(converted(model, x, policy.replace(rules=found.remedy)), x, loss)
        worse = scale is None or scale < found.least_scale
        outcome.cured = worse and again is not None and again >= found.least_scale
    if not (outcome.named and outcome.cured):
        outcome.detail = f"seed {seed}: the loop settles at {scale}\n{found}"
    return outcome
