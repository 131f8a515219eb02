"""Graphs that run node by node: same results as a call, values that go away, no trace in the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.runtime.run_graph import Draws, GraphRun, flat_inputs, floats


class Small(nn.Module):
    """Batch norm, dropout, a keyword argument, a region without gradients and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = self.drop(self.norm(self.conv(x)))
        with torch.no_grad():
            scale = y.abs().amax()
        return {"y": y + shift, "z": y / scale}


@pytest.fixture
def converted() -> tuple[ampgraph.AmpModule, tuple, dict]:
    torch.manual_seed(0)
    args, kwargs = (torch.randn(2, 3, 8),), {"shift": torch.randn(4, 1)}
    return ampgraph.convert(Small().train(), args, kwargs, policy="O2", dtype=torch.float16), args, kwargs


def test_result_equals_the_call(converted):
    amp, args, kwargs = converted
    run = GraphRun(amp.graph_module, flat_inputs(amp.graph_module, args, kwargs))
    torch.manual_seed(1)
    names = [node.name for node, _ in run]
    found = run.result()
    torch.manual_seed(1)
    expected = amp.graph_module(*args, **kwargs)
    assert names == [node.name for node in amp.graph_module.graph.nodes if node.op != "output"]
    assert list(found) == list(expected)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)
        assert found[key].requires_grad


def test_leaves_buffers_alone(converted):
    amp, args, kwargs = converted
    before = {name: value.clone() for name, value in amp.named_buffers()}
    for _ in GraphRun(amp.graph_module, flat_inputs(amp.graph_module, args, kwargs)):
        pass
    for name, value in amp.named_buffers():
        assert torch.equal(value, before[name]), name


def test_values_are_dropped_after_their_last_use(converted):
    amp, args, kwargs = converted
    run = GraphRun(amp.graph_module, flat_inputs(amp.graph_module, args, kwargs))
    position = {node: i for i, node in enumerate(amp.graph_module.graph.nodes)}
    last = {node: max(map(position.get, node.users), default=position[node]) for node in position}
    for node, value in run:
        assert all(position[node] <= last[alive] for alive in run.values)
        assert set(node.all_input_nodes) <= set(run.values)
        assert run.values[node] is value
    assert not run.values


def test_what_is_written_to_values_is_read(converted):
    amp, args, kwargs = converted
    run = GraphRun(amp.graph_module, flat_inputs(amp.graph_module, args, kwargs))
    for node, value in run:
        if node.op == "call_function" and floats(value) and not isinstance(value, (list, tuple)):
            run.values[node] = torch.zeros_like(value)
    assert not run.result()["y"].any()


def test_grad_mode_of_the_graph_does_not_leak(converted):
    amp, args, kwargs = converted
    for _ in GraphRun(amp.graph_module, flat_inputs(amp.graph_module, args, kwargs)):
        assert torch.is_grad_enabled()
    with torch.no_grad():
        for _, value in GraphRun(amp.graph_module, flat_inputs(amp.graph_module, args, kwargs)):
            assert not any(t.requires_grad and not t.is_leaf for t in floats(value))


def test_runs_draw_the_same_numbers(converted):
    amp, args, kwargs = converted
    from ampgraph.report.replan import without_casts

    draws, masks = Draws(), []
    for graph_module in (amp.graph_module, without_casts(amp.graph_module, amp.plan)):
        for node, value in GraphRun(graph_module, flat_inputs(graph_module, args, kwargs), draws):
            if "dropout" in node.name:
                masks.append(value == 0)
    assert len(masks) == 2
    assert masks[0].any()
    assert torch.equal(*masks)
