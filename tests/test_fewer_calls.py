"""The graph of a step has fewer calls than the trace, and the same results."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ampgraph
from ampgraph.step.equal_calls import merge_equal_calls
from ampgraph.step.fewer_calls import share_views, shorten_calls
from ampgraph.step.live_graph import is_impure

X = torch.arange(24.0).view(4, 6)


def traced(function, *args: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        graph_module = make_fx(function, tracing_mode="fake")(*args)
    graph_module.graph.eliminate_dead_code(is_impure)
    graph_module.recompile()
    return graph_module


def edited(graph_module: fx.GraphModule, *edits: Callable[[fx.Graph], None]) -> fx.GraphModule:
    graph = copy.deepcopy(graph_module.graph)
    for edit in edits:
        edit(graph)
    graph.eliminate_dead_code(is_impure)
    return fx.GraphModule(graph_module, graph)


def fewer(graph_module: fx.GraphModule) -> fx.GraphModule:
    return edited(graph_module, share_views, shorten_calls)


def merged(graph_module: fx.GraphModule) -> fx.GraphModule:
    return edited(graph_module, share_views, merge_equal_calls)


def calls(graph_module: fx.GraphModule) -> list[str]:
    names = [str(node.target).removeprefix("aten.") for node in graph_module.graph.nodes if "call" in node.op]
    return ["detach.default" if name == "alias.default" else name for name in names]  # torch 2.15


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.t().t() + 1, ["add.Tensor"]),
        (lambda x: x.t() @ x + x.t() @ x, ["t.default", "mm.default", "mm.default", "add.Tensor"]),
        (lambda x: x.detach().view(4, 6).expand(4, 6) * 2, ["mul.Tensor"]),
        (lambda x: x.sum([0], True).view(6) * 2, ["sum.dim_IntList", "mul.Tensor"]),
        (lambda x: x.sum([0], True).view(3, 2) * 2, ["sum.dim_IntList", "view.default", "mul.Tensor"]),
        (
            lambda x: x[0, 0].sum([0], True).view(1) * 2,
            ["select.int", "select.int", "sum.dim_IntList", "view.default", "mul.Tensor"],
        ),
        (lambda x: x.double() * 2, ["to.dtype", "mul.Tensor"]),
        (lambda x: torch.ops.aten._to_copy(x, dtype=x.dtype).mul_(2), ["_to_copy.default", "mul_.Tensor"]),
        (lambda x: (x.detach(), x.detach()), ["detach.default", "detach.default"]),
        (lambda x: x.view(6, 4) + x.t(), ["view.default", "t.default", "add.Tensor"]),
        (lambda x: x.detach().unsqueeze_(0) + x, ["detach.default", "unsqueeze_.default", "add.Tensor"]),
    ],
)
def test_calls_that_are_left(function, expected) -> None:
    before = traced(function, X)
    after = fewer(before)
    assert calls(after) == expected
    wanted, found = (run(X.clone()) for run in (before, after))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def _with_running_statistics(x: Tensor) -> Tensor:
    mean, variance = x.sum(0), x.abs().sum(0)
    before = mean + 1
    y, *_ = torch.ops.aten.native_batch_norm(x, None, None, mean, variance, True, 0.5, 1e-5)
    return y + before + (mean + 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.bfloat16() + x.detach().bfloat16(), ["_to_copy.default", "add.Tensor"]),
        (lambda x: x.exp() * x.exp(), ["exp.default", "mul.Tensor"]),
        (lambda x: x.t().exp() * x.t().exp(), ["t.default", "exp.default", "mul.Tensor"]),
        (lambda x: (x.exp(), x.exp()), ["exp.default", "exp.default"]),
        (lambda x: (x.exp(), x.exp() + 1), None),
        (lambda x: (x.exp().view(-1), x.exp().t()), None),
        (lambda x: (x.max(0).values, x.max(0).values), None),
        (lambda x: (x.t(), (x + 1) * (x + 1)), ["t.default", "add.Tensor", "mul.Tensor"]),
        (lambda x: (x + 1).sum() + (x + 1.0).sum(), 2 * ["add.Tensor", "sum.default"] + ["add.Tensor"]),
        (lambda x: x.sum(0) * x.sum(0), ["sum.dim_IntList", "mul.Tensor"]),
        (lambda x: x @ x.t() + x @ x.t(), ["t.default", "mm.default", "add.Tensor"]),
        (lambda x: torch.native_dropout(x, 0.5, True)[0] + torch.native_dropout(x, 0.5, True)[0], None),
        (lambda x: torch.rand_like(x) + torch.rand_like(x), None),
        (lambda x: x.exp() + x.mul_(2) + x.exp(), None),
        (lambda x: x.exp().mul_(2) + x.exp(), None),
        (lambda x: x.exp().view(-1).mul_(2).sum() + x.exp(), None),
        (_with_running_statistics, None),
    ],
)
def test_equal_calls_that_are_merged(function, expected) -> None:
    before = traced(function, X)
    after = merged(before)
    assert sorted(calls(after)) == sorted(calls(before) if expected is None else expected)
    torch.manual_seed(0)
    wanted = before(X.clone())
    torch.manual_seed(0)
    torch.testing.assert_close(after(X.clone()), wanted, rtol=0, atol=0)


VIEWS = {
    "t": lambda x: x.t(),
    "detach": lambda x: x.detach(),
    "square": lambda x: x.reshape(-1).view(4, 4),
    "rows": lambda x: torch.stack(x.unbind(0)[::-1]),
    "row": lambda x: x[1].expand(4, 4),
    "half": lambda x: x.view(2, 8)[:, :4].repeat(2, 1),
    "elementwise": lambda x: x.t().neg().bfloat16().float(),
    "twice": lambda x: x.unsqueeze(0).permute(2, 1, 0).squeeze(2),
}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([*VIEWS]), st.booleans()), min_size=1, max_size=9)
)
def test_random_views_with_writes_in_place(steps) -> None:
    def function(x: Tensor) -> Tensor:
        values = [x]
        for which, view, writes in steps:
            values.append(VIEWS[view](values[which % len(values)].contiguous()))
            if writes and 0 not in values[-1].stride():
                values[-1].mul_(2).add_(which)
        return torch.stack([*values, *[v.t() for v in values]])

    before = traced(function, torch.zeros(4, 4))
    wanted_input = torch.arange(16.0).view(4, 4)
    wanted = before(wanted_input)
    for after in (fewer(before), merged(before)):
        assert len(calls(after)) <= len(calls(before))
        x = torch.arange(16.0).view(4, 4)
        assert torch.equal(after(x), wanted)
        assert torch.equal(x, wanted_input)


def test_a_step_of_linear_layers_views_each_tensor_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    amp = ampgraph.convert(model, (torch.randn(4, 8),), policy="O1", dtype=torch.bfloat16, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda amp, x: amp(x).square().mean())
    for _ in range(3):
        step(torch.randn(4, 8))
    assert step.reason is None
    found = calls(step.graph_modules[0])
    # Transposed are three weights for the forward, which two of the backward's products read again,
    # and three gradients.
    assert found.count("t.default") == 6
    assert found.count("detach.default") == 1  # of the loss, which the step returns
    assert "view.default" not in found


def test_a_changed_graph_runs() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    amp = ampgraph.convert(model, (torch.randn(4, 8),), policy="O1", dtype=torch.bfloat16, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda amp, x: amp(x).square().mean())
    x = torch.randn(4, 8)
    for _ in range(2):
        step(x)
    (graph_module,) = step.graph_modules
    for node in graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._fused_sgd_.tensor_lr
    ):
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    assert step(x) == step(x)
