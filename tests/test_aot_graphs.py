"""`amp.forward_graph` and `amp.backward_graph`: the graphs of AOTAutograd."""

import collections
import functools
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo import symbolic_convert

import ampgraph
from ampgraph._compat import compiled_by_dynamo
from ampgraph.origin import module_stack
from ampgraph.training.gradient_boundary import non_finite

from .models import ReluNet

aten = torch.ops.aten
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
CAPTURES = pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])


class Doubled(torch.autograd.Function):
    """Returns its argument; the gradient is doubled."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class ReturnsItsArgument(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


@functools.cache
def trained(args, backend="aot_eager", **options):
    """Returns a model after one step; shared by the tests, which change none of it."""
    torch.manual_seed(0)
    amp = ampgraph.convert(ReluNet(), args, dtype=torch.float16, backend=backend, **options)
    amp(X).square().mean().backward()
    return amp


def roles(graph_module):
    marks = [node.meta.get("ampgraph", {}).get("boundary") for node in graph_module.graph.nodes]
    return [role for role, _ in itertools.groupby(marks)]


@CAPTURES
def test_nodes_lie_in_modules_of_the_model_only(args):
    amp = trained(args)
    for graph_module in (amp.forward_graph, amp.backward_graph):
        assert {path for n in graph_module.graph.nodes for path in module_stack(n)} <= {"first", "second"}


@CAPTURES
def test_scale_unscale_and_finite_check_in_the_backward(args):
    graph_module = trained(args).backward_graph
    assert roles(graph_module) == [None, "scale", None, "unscale", "finite check", None]
    marked = [n for n in graph_module.graph.nodes if n.meta.get("ampgraph")]
    first = {node.meta["ampgraph"]["boundary"]: node for node in reversed(marked)}
    tangent, scale = first["scale"].args
    assert tangent.name == "tangents_1"
    assert scale.op == "placeholder"
    assert scale.meta["val"].shape == ()
    unscaled = [n for n in marked if n.meta["ampgraph"]["boundary"] == "unscale"]
    assert {n.args[1].op for n in unscaled} == {"placeholder"}
    assert all(n.args[0].meta["val"].dtype == torch.float32 for n in unscaled)
    assert len(unscaled) == 4
    assert first["finite check"].target is aten.abs.default


@CAPTURES
def test_products_of_both_directions_are_low(args):
    amp = trained(args)
    for graph_module in (amp.forward_graph, amp.backward_graph):
        products = [n for n in graph_module.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
        assert products
        assert all(n.meta["val"].dtype == torch.float16 for n in products)


@CAPTURES
def test_forward_casts_no_weight(args):
    def weights_cast(amp):
        casts = [n for n in amp.forward_graph.graph.nodes if n.target is aten._to_copy.default]
        return [n for n in casts if tuple(n.meta["val"].shape) in ((16, 8), (4, 16))]

    assert len(weights_cast(trained(args, policy=ampgraph.Policy(weight_copies=False)))) == 2
    assert weights_cast(trained(args, policy="O1")) == weights_cast(trained(args, policy="O2")) == []


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.one, self.last = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 2, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.last(self.one(self.deep(self.wide(x))))


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_training_casts_weights_whose_layout_a_compiler_changes(capture):
    """It does both in one kernel. A copy in the old layout would need a kernel more."""

    def shapes_cast(amp):
        graph = amp.forward_graph.graph
        casts = graph.find_nodes(op="call_function", target=aten._to_copy.default)
        shapes = {str(list(n.meta["val"].shape)) for n in casts}  # some have symbols
        return shapes & {str(list(p.shape)) for p in amp.parameters()}

    x = torch.randn(2, 4, 9, 9)
    given = {"dtype": torch.bfloat16, "backend": "aot_eager", "capture": capture}
    trained, served = (ampgraph.convert(Strided(), (x,), **given) for _ in range(2))
    trained(x).sum().backward()
    with torch.no_grad():
        served(x)
    assert shapes_cast(trained) == {"[8, 4, 3, 3]", "[8, 1, 3, 3]"}
    assert shapes_cast(served) == set()
    assert all(p.grad.dtype == torch.float32 for p in trained.parameters())


def test_without_gradients_the_forward_is_the_inference_graph():
    amp = ampgraph.convert(ReluNet(), (X,), dtype=torch.float16, backend="aot_eager")
    with torch.no_grad():
        amp(X)
    assert roles(amp.forward_graph) == [None]
    with pytest.raises(ampgraph.AmpGraphError, match="no backward graph yet: call the model, with gradients"):
        _ = amp.backward_graph


def test_other_backends_say_who_has_one():
    amp = trained((X,), backend="eager")
    with pytest.raises(ampgraph.AmpGraphError, match=r"'eager' keeps no backward graph.*backend='aot_eager'"):
        _ = amp.backward_graph


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 3], [4], [1, 1, 1], [0, 1, 3, 3], [0, 4, 4]])
def test_flags_by_slot(slots):
    for bad in itertools.product([False, True], repeat=len(slots)):
        tensors = [torch.full((2,), torch.inf if b else 1.0) for b in bad]
        expected = [float(any(b and s == slot for s, b in zip(slots, bad, strict=True))) for slot in range(5)]
        assert non_finite(tensors, slots, 5).tolist() == expected
        assert non_finite(tensors, slots, 5, are_new=True).tolist() == expected


SPECIAL = (0.0, -0.0, 1e-45, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(), (1,), (37,), (5, 3, 8, 8)])
def test_the_check_of_new_gradients_finds_the_same_and_keeps_their_values(dtype, size):
    values = [torch.ones(size, dtype=dtype) for _ in SPECIAL]
    for value, first in zip(values, SPECIAL, strict=True):
        value.view(-1)[0] = first
    values += [v.to(memory_format=torch.channels_last) for v in values if v.dim() == 4]
    given = [v.clone() for v in values]
    slots = range(len(given))
    found = non_finite(given, slots, len(given), are_new=True)
    assert found.tolist() == [float(not v.isfinite().all()) for v in values]
    before = [v._version for v in values]
    assert found.tolist() == non_finite(values, slots, len(given)).tolist()
    assert before == [v._version for v in values]
    for value, kept in zip(values, given, strict=True):
        assert value.stride() == kept.stride()
        torch.testing.assert_close(kept, value, rtol=0, atol=0, equal_nan=True)
        is_number = ~value.isnan()  # a NaN may become another NaN
        assert torch.equal(kept[is_number].signbit(), value[is_number].signbit())


def test_roles_are_annotations_and_not_read_from_stack_traces():
    # Reads of copies have the traces of their readers.
    amp = trained((X,), policy=ampgraph.Policy(weight_copies=False))
    marked = [n for n in amp.training_graph.graph.nodes if n.meta.get("ampgraph", {}).get("boundary")]
    assert {n.meta["ampgraph"]["boundary"] for n in marked} == {"unscale", "scale"}
    assert not any("stack_trace" in n.meta for n in marked)
    graph = amp.backward_graph.graph
    kept = [n.meta.get("custom") for n in graph.nodes if n.meta.get("ampgraph")]
    assert {mark["ampgraph_boundary"] for mark in kept} == {"scale", "unscale", "finite check"}


def test_work_of_dynamo_grows_with_the_number_of_parameters_and_not_with_its_square(monkeypatch):
    traced, x = collections.Counter(), X[:, :4].contiguous()
    step = symbolic_convert.InstructionTranslatorBase.step

    def counted(translator):
        traced["instructions"] += 1
        return step(translator)

    def instructions(layers):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        amp = ampgraph.convert(model, (x,), dtype=torch.float16, backend=lambda graph, _: graph.forward)
        traced.clear()
        amp(x)
        return traced["instructions"]

    monkeypatch.setattr(symbolic_convert.InstructionTranslatorBase, "step", counted)
    two, four, eight = map(instructions, (2, 4, 8))
    assert 0 < eight - four < 2.2 * (four - two)


def test_other_functions_of_autograd_are_traced_as_torch_traces_them():
    """Autograd returns a view where a function returns its argument; so does Dynamo's graph."""
    seen = []

    def backend(graph_module, _):
        seen.extend(n.target for m in graph_module.modules() for n in m.graph.nodes if n.op == "call_method")
        return graph_module.forward

    name = "DynamoAutogradFunctionTraceHelper"
    helper = getattr(torch._functorch.autograd_function, name, None)  # not in torch 2.11
    before = helper and vars(helper)["fwd_trace_helper"]
    x = X.clone().requires_grad_()
    compiled_by_dynamo(ReturnsItsArgument(), backend)(x).sum().backward()
    assert "view_as" in seen
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert helper is None or vars(helper)["fwd_trace_helper"] is before


def test_models_share_no_count_of_compilations_and_no_sizes() -> None:
    """Dynamo remembers both by code object, and all models are called by one function."""
    sizes = []
    with torch._dynamo.config.patch(accumulated_recompile_limit=3, recompile_limit=3):
        for width in range(3, 9):
            x = torch.randn(2, width)
            amp = ampgraph.convert(nn.Linear(width, 4), (x,), dtype=torch.bfloat16, backend="aot_eager")
            amp(x)
            inputs = amp.forward_graph.graph.find_nodes(op="placeholder")
            sizes.append({tuple(node.meta["val"].shape) for node in inputs})  # torch 2.15: weights first
    assert sizes == [{(2, width), (4, width), (4,)} for width in range(3, 9)]
