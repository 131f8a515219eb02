"""Memory that nothing has written (``torch.empty``) is no evidence: no tool judges what it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph
from ampgraph import Policy
from ampgraph._compat import all_op_names
from ampgraph.numerics.run_model import ModelRunner, Part
from ampgraph.ops import kernel_tables
from ampgraph.passes.analysis.unwritten import unwritten
from ampgraph.runtime.run_graph import Draws, GraphRun, flat_inputs
from ampgraph.tuning.planned_graph import PlannedGraph
from ampgraph.tuning.sensitivity import Probes

pytestmark = pytest.mark.usefixtures("shared_captures")
F16 = torch.float16
CAPTURES = ["ahead of time", "just in time"]


def gumbel(y: Tensor) -> Tensor:
    return F.gumbel_softmax(y, dim=-1)


def drop_path(y: Tensor) -> Tensor:
    return y + y * y.new_empty(len(y), 1).bernoulli_(0.8).div_(0.8)


def halves(y: Tensor) -> Tensor:
    out = torch.empty(8, 8)
    out[:, :3] = y[:, :3]
    out[:, 3:] = y[:, 3:]
    return out * 2


def selection(y: Tensor) -> Tensor:
    out, even = torch.empty_like(y), torch.arange(0, 8, 2)
    out[even] = y[even].relu()
    out[even + 1] = y[even + 1]
    return out.view(4, 16).relu().view(8, 8)


def steps(y: Tensor) -> Tensor:
    out = y.new_empty(3, 8, 8)
    for index in range(3):
        out[index] = y = y.tanh()
    return out.sum(0)


def mask(y: Tensor) -> Tensor:
    out = torch.empty(8, 8)
    out[:, :6] = 0
    out[:, 6:] = -math.inf
    return (y + out).softmax(-1)


FILLS = [gumbel, drop_path, halves, selection, steps, mask]
BY_NAME = {"argvalues": FILLS, "ids": [f.__name__ for f in FILLS]}


class Filling(nn.Module):
    """Fills memory between two layers; the values overflow float16 after it, if the gain is large."""

    def __init__(self, fill: Callable[[Tensor], Tensor], gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.fill, self.gain = nn.Linear(8, 8), nn.Linear(8, 8), fill, gain

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.fill(self.first(x))) * self.gain
        return (y * y.roll(1, -1)).mean(-1)


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def converted(model: nn.Module, capture: str = "ahead of time", **given: Any) -> ampgraph.AmpModule:
    policy = Policy("O2", F16, hazards=False)
    return ampgraph.convert(model, (X,), policy=policy, capture=capture, backend="eager", **given)


class Garbage(TorchDispatchMode):
    """Puts a number into memory that nothing has written, as an allocator may."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_garbage = "empty" in func.__name__ and result.is_floating_point()
        return result.copy_(torch.tensor(self.number)) if is_garbage else result


@pytest.fixture
def filled_with_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# -- which nodes -------------------------------------------------------------------------------------


def test_the_table_has_every_op_of_this_kind() -> None:
    packets = {name.removeprefix("aten.").partition(".")[0] for name in all_op_names() if "aten." in name}
    found = {name.rstrip("_") for name in packets if {"empty", "resize"} & {*name.split("_")}}
    # The first fills what it resizes; values of sparse tensors are not looked at.
    others = {"_copy_from_and_resize", "sparse_resize", "sparse_resize_and_clear", "resize_as_sparse"}
    assert found - others == kernel_tables.UNINITIALIZED


def whole(x: Tensor) -> Tensor:
    out = torch.empty(8, 8)
    flat = out.view(-1)
    flat.copy_(x.view(-1))
    out.index_add_(0, torch.arange(8), x)
    return out[:3] + flat.view(8, 8)[:3]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (gumbel, ["empty_like"]),
        (drop_path, ["new_empty"]),
        # Views of what may be written in part only; the results of writes are the model's.
        (halves, ["empty", "slice_2", "slice_4"]),
        (selection, ["empty_like", "index_put_", "index_put__1", "view"]),
        (steps, ["new_empty", "select", "select_1", "select_2"]),
        (whole, ["empty", "view"]),
        (lambda x: torch.zeros(8, 8).add_(x), []),
    ],
)
def test_nodes(function: Callable, expected: list[str]) -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    graph = converted(Plain()).graph_module.graph
    assert [node.name for node in graph.nodes if node in unwritten(graph)] == expected


@pytest.mark.parametrize("fill", **BY_NAME)
def test_nodes_that_are_judged_hold_no_garbage(fill: Callable) -> None:
    """The other way round: what garbage reaches is found, and the rest of the values is the same."""
    amp = converted(Filling(fill))
    seen = []
    for number in (0.0, 1e30):
        torch.manual_seed(1)
        run = GraphRun(amp.graph_module, flat_inputs(amp.graph_module, (X,), {}))
        with Garbage(number):
            seen.append({n: v.clone() for n, v in run if isinstance(v, Tensor)})
    differ = {n for n, value in seen[0].items() if not torch.equal(value, seen[1][n])}
    assert differ
    assert differ <= unwritten(amp.graph_module.graph)


# -- the tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("fill", **BY_NAME)
def test_watch_and_check_numerics_find_nothing(fill: Callable, capture: str, filled_with_nan: None) -> None:
    amp = converted(Filling(fill), capture)
    with ampgraph.watch(amp, on="abort") as watched:
        amp(X).mean().backward()
    assert watched.sightings == []
    assert ampgraph.check_numerics(amp, (X,)) is None


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("fill", [gumbel, drop_path, halves, selection, steps])
def test_a_later_overflow_is_named(fill: Callable, capture: str, filled_with_nan: None) -> None:
    amp = converted(Filling(fill, 3000.0), capture)
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    amp.scaler.attach(optimizer)
    with ampgraph.watch(amp) as watched:
        amp(X).mean().backward()
    for _ in range(2):
        optimizer.zero_grad()
        amp(X).mean().backward()
        optimizer.step()
    finding, overflow = ampgraph.check_numerics(amp, (X,)), amp.scaler.last_overflow
    assert finding is not None
    assert overflow is not None
    named = {watched.sightings[0].node, finding.node, overflow.node}
    assert len(named) == 1
    assert next(iter(named)).startswith("mul")
    assert finding.remedy


@pytest.mark.parametrize("number", [1e30, math.nan])
@pytest.mark.parametrize("fill", **BY_NAME)
def test_no_tool_measures_it(fill: Callable, number: float) -> None:
    amp = converted(Filling(fill))
    with Garbage(number):
        assert ampgraph.check_numerics(amp, (X,)) is None
        ranges = ampgraph.calibrate(amp, [(X,)])
        assert ampgraph.check_numerics(amp, (X,), calibration=ranges) is None
        compared = ampgraph.compare(amp, (X,))
        policy = ampgraph.tune(Filling(fill), [(X,)], budget=0.1, level="O2", dtype=F16)
    statistics = [row for graph in ranges.graphs.values() for row in graph.values.values()]
    assert max(row.peak for row in statistics) < 1e3
    assert max(row.headroom for row in compared.rows) < 1
    assert sum(row.nonfinite for row in compared.rows) == 0
    assert policy.rules == {}
    assert converted(Filling(fill), calibration=ranges).policy.rules == amp.policy.rules


@pytest.mark.parametrize("fill", **BY_NAME)
def test_it_has_no_part_in_what_tune_estimates(fill: Callable) -> None:
    amp, graphs, found = converted(Filling(fill)), [], []
    for number in (0.0, 1e30):
        probes, runner = Probes(F16), ModelRunner(amp, (X,))

        def run_part(part: Part, inputs: list[Any], probes: Probes = probes) -> Any:
            graphs[:] = graphs or [PlannedGraph(part, amp.policy)]
            return probes.run_part(graphs[0], inputs, Draws())

        torch.manual_seed(1)
        with Garbage(number):
            result = runner(run_part, gradients=True)
        probes.backward([result], [1.0], 2)
        found.append(probes.result(graphs))
    assert found[0].beyond == found[1].beyond
    assert found[0].squares == found[1].squares
    assert any(found[0].squares.values())


def test_a_fault_in_float32_is_traced_through_it() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(selection(self.first(x).sub(100).log()))

    finding = ampgraph.check_numerics(converted(Broken()), (X,))
    assert finding is not None
    assert finding.in_float32
    assert finding.node == "log"


def test_writes_to_sparse_tensors_are_no_fills() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sparse", torch.eye(8).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            y = torch.empty(8, 8)
            y.copy_(x)
            self.sparse.mul_(1.0)
            return torch.sparse.mm(self.sparse, y)

    graph = converted(Sparse()).graph_module.graph
    assert [node.name for node in unwritten(graph)] == ["empty"]
