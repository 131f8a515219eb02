"""`compile_step` keeps its graphs: beside a state of Python values that has none, and beside many sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph.step import compile_step

from .test_step_surroundings import Run, X, Y, both, layer, plain_loss

pytestmark = pytest.mark.filterwarnings("ignore:ampgraph.compile_step runs the plain loop")


class Stop(Exception):
    pass


def asks(what: Callable[[Any, Tensor], object]) -> Callable[[Any], Callable]:
    """Makes a loss that does something only if ``run.flag`` is set."""

    def loss_of(run: Any) -> Callable:
        run.flag, run.logged = False, 0

        def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            found = F.cross_entropy(amp(x), y)
            if run.flag:
                what(run, found)
            return found

        return loss

    return loss_of


def with_flags(run: Any, flags: str) -> str:
    """Takes a step for each letter, with the flag at ``+``; returns ``G`` for graphs and ``.`` for loops."""
    first = len(run.reasons)
    for letter in flags:
        run.flag = letter == "+"
        run.train(1)
    return "".join("G" if reason is None else "." for reason in run.reasons[first:])


def a_number(run: Any, loss: Tensor) -> None:
    float(loss.detach())


def a_branch(run: Any, loss: Tensor) -> None:
    if loss > 1e9:
        raise Stop


def a_write(run: Any, loss: Tensor) -> None:
    X.add_(0)


@pytest.mark.parametrize("what", [a_number, a_branch, a_write])
def test_a_state_without_a_graph_runs_the_loop_alone(what: Callable) -> None:
    found = []

    def story(run: Any) -> None:
        found.append(with_flags(run, "----" + 3 * "++--"))

    whole = both(story, asks(what))
    assert found[0] == "..GG" + 3 * "..GG"
    assert len(whole.step.graph_modules) == 1


def test_the_reason_says_what_reads_a_value() -> None:
    whole = both(lambda run: with_flags(run, "++++"), asks(a_number))
    assert "loss_fn reads the value of a tensor, which a graph does not know (" in str(whole.reasons[-1])
    assert "float(loss.detach())" in str(whole.reasons[-1])


def test_a_loss_that_raises_leaves_the_graphs() -> None:
    def raises(run: Any, loss: Tensor) -> None:
        raise Stop

    run: Any = Run(True, asks(raises), layer())
    run.train(4)
    run.flag = True
    for _ in range(3):
        with pytest.raises(Stop):
            run.train(1)
    assert with_flags(run, "--") == "GG"


def test_a_loss_that_changes_what_it_reads_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    traced = compile_step.trace_step
    monkeypatch.setattr(compile_step, "trace_step", lambda *args: traces.append(args) or traced(*args))

    def counts(run: Any, loss: Tensor) -> None:
        run.logged += 1

    whole = both(lambda run: with_flags(run, 8 * "+"), asks(counts))
    assert "loss_fn changes" in str(whole.reasons[-1])
    assert len(traces) == 1


class Asking(nn.Module):
    """A model that reads a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = layer(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor


def test_a_model_that_is_captured_only_now_gets_its_graph() -> None:
    """The third step would be traced, but the model has no capture with this value."""

    def story(run: Any) -> None:
        for i in range(12):
            run.model.factor = float(1 + i % 3)
            run.train(1)

    assert both(story, model=Asking).reasons[-3:] == [None] * 3


def test_after_many_values_the_graphs_that_are_there_run_on() -> None:
    def loss_of(run: Any) -> Callable:
        run.factor = 0.0
        return lambda amp, x, y: F.cross_entropy(amp(x), y) * run.factor

    def story(run: Any) -> None:
        for i in [0, *range(12), 0, 1, 11]:
            run.factor = 1.0 + i
            run.train(2)

    reasons = both(story, loss_of).reasons[-6:]
    assert reasons[:4] == [None] * 4
    assert "change again and again" in str(reasons[-1])


def test_a_backend_that_does_not_compile_one_state() -> None:
    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        if any("tanh" in node.name for node in graph_module.graph.nodes):
            raise Stop
        return graph_module.forward

    factor: list[Callable] = [torch.relu]
    amp = ampgraph.convert(layer(), (X,), dtype=torch.float16, backend=backend)
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-2, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda amp, x, y: F.cross_entropy(factor[0](amp(x)), y))
    reasons = []
    for function in (torch.relu, torch.tanh, torch.relu):
        factor[0] = function
        for _ in range(3):
            step(X, Y)
            reasons.append(step.reason)
    assert "compiling fails with" in str(reasons[5])
    assert reasons[-3:] == [None] * 3


# -- many sizes ----------------------------------------------------------------------------------------------


def graphs_of(run: Run, sizes: Iterable[int]) -> list[int]:
    """Takes a step with each number of rows; returns those that ran a graph."""
    found = []
    for rows in sizes:
        run.take(X[:rows], Y[:rows])
        found += [rows] if run.reasons[-1] is None else []
    return found


@pytest.fixture
def few_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_step, "MOST_KINDS", 3)
    monkeypatch.setattr(compile_step, "LONG_UNUSED", 12)


@pytest.mark.usefixtures("few_kinds")
def test_sizes_in_cycles_keep_their_graphs() -> None:
    run = Run(True, plain_loss, layer())
    run.take(X, Y)  # makes the state of Adam
    run.take(X, Y)
    sizes = [2, 3, 4, 5]
    with pytest.warns(UserWarning, match="keeps the graphs of 3 combinations of sizes"):
        graphs_of(run, 3 * sizes)
    kept = graphs_of(run, sizes)
    assert len(kept) >= 2
    assert graphs_of(run, 5 * sizes) == 5 * kept
    (reason,) = {reason for reason in run.reasons[-len(sizes) :] if reason is not None}
    assert "keeps the graphs of 3 combinations of sizes" in reason


@pytest.mark.usefixtures("few_kinds")
def test_sizes_that_came_long_ago_make_room() -> None:
    run = Run(True, plain_loss, layer())
    graphs_of(run, [6, *3 * [2, 3, 4]])
    assert graphs_of(run, [5, 6]) == []
    assert graphs_of(run, 8 * [5, 6])[-4:] == [5, 6, 5, 6]
