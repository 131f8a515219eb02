"""Results that stay float32 beside low ones: the statistics that norms save, running statistics."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import Policy
from ampgraph._compat import dtypes_of
from ampgraph.passes.pipeline import rewrite

from .helpers import GraphBuilder, close, nodes_of
from .one_op_checks import check_real_dtypes

aten = torch.ops.aten
F16, F32 = torch.float16, torch.float32
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Normed(nn.Module):
    """A batch norm after a convolution, with the statistics that it saves."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        norm = self.norm
        state = norm.weight, norm.bias, norm.running_mean, norm.running_var
        y, mean, rstd = torch.native_batch_norm(self.conv(x), *state, True, 0.1, 1e-5)
        return y.relu(), mean, mean * rstd


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_saved_statistics_stay_float32_without_a_cast(level):
    model = Normed()
    expected = model(X)
    amp = ampgraph.convert(model, (X,), policy=level, dtype=F16)
    check_real_dtypes(amp.graph_module, (X,))
    (norm,) = nodes_of(amp.graph_module, "native_batch_norm")
    assert [t.dtype for t in norm.meta["val"]] == [F16, F32, F32]
    (product,) = nodes_of(amp.graph_module, "mul")
    assert all(read.target is not aten.to.dtype for read in product.all_input_nodes)
    for mine, theirs in zip(amp(X), expected, strict=True):
        assert mine.dtype == F32
        close(mine, theirs)
    assert "this result has one dtype" in ampgraph.explain(amp).why(product.all_input_nodes[0].name)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_batch_norm_decomposed_in_training(level):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    expected = model(X)
    running = model[1].running_mean.clone()
    model[1].reset_running_stats()
    program = torch.export.export(model, (X,)).run_decompositions()
    converted = ampgraph.convert(program, policy=level, dtype=F16)
    (norm,) = nodes_of(converted.graph_module, "_native_batch_norm_legit_functional")
    assert [t.dtype for t in norm.meta["val"]] == [F16, *[F32] * 4]
    module = converted.module()
    close(module(X), expected)
    close(module.get_buffer("1.running_mean"), running)


AFFINE, FULL = ("w", "w"), ("w", "w", "r", "r")
NORMS = {
    aten.native_batch_norm.default: ("x", *FULL, True, 0.1, 1e-5),
    aten._native_batch_norm_legit.default: ("x", *FULL, True, 0.1, 1e-5),
    aten._native_batch_norm_legit.no_stats: ("x", *AFFINE, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: ("x", *FULL, 0.1, 1e-5),
    aten._native_batch_norm_legit_functional.default: ("x", *FULL, True, 0.1, 1e-5),
    aten._batch_norm_with_update.default: ("x", *FULL, 0.1, 1e-5),
    aten._batch_norm_with_update_functional.default: ("x", *FULL, 0.1, 1e-5),
    aten._batch_norm_no_update.default: ("x", *FULL, 0.1, 1e-5),
    aten._batch_norm_impl_index.default: ("x", *FULL, True, 0.1, 1e-5, False),
    aten.native_layer_norm.default: ("x", [4], *AFFINE, 1e-5),
    aten.native_group_norm.default: ("x", *AFFINE, 3, 4, 4, 2, 1e-5),
}


@pytest.mark.parametrize("state", [F32, F16], ids=str)
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_fake_statistics_are_those_of_the_kernel(op, state):
    build = GraphBuilder()
    x, ones = torch.randn(3, 4, 4).to(F16), torch.ones(4, dtype=state)
    real = {"x": x, "w": ones, "r": ones.clone()}
    fake = {name: build.input(*value.shape, dtype=value.dtype) for name, value in real.items()}
    recorded = build.call(op, *(fake[a] if isinstance(a, str) else a for a in NORMS[op])).meta["val"]
    found = op(*(real[a] if isinstance(a, str) else a for a in NORMS[op]))
    assert dtypes_of(recorded) == dtypes_of(found)


@pytest.mark.parametrize(("device", "statistics"), [("cpu", F16), ("cuda", F32)])
def test_what_a_norm_saves_depends_on_the_device(device, statistics):
    """No GPU is needed to plan for one: FakeTensor knows its kernels."""
    build = GraphBuilder(device=device)
    x, weight, affine = build.input(4, 8), build.weight(8, 8), build.weight(8)
    norm = build.call(
        aten.native_layer_norm.default, build.call(aten.mm.default, x, weight), [8], affine, affine, 1e-5
    )
    y, mean = build.call(operator.getitem, norm, 0), build.call(operator.getitem, norm, 1)
    graph_module = build.finish(
        build.call(aten.mm.default, y, weight), build.call(aten.mul.Tensor, mean, 2.0)
    )
    rewrite(graph_module, Policy(dtype=F16))
    assert [t.dtype for t in norm.meta["val"]] == [F16, statistics, statistics]
    assert mean.meta["val"].dtype == statistics
