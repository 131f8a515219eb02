"""Norms whose backward reads low values: where, the same forward, and gradients like autocast's."""

from __future__ import annotations

import copy
import math
import pickle
import statistics
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph import NoLossScale, OpLists, Policy
from ampgraph.passes import SaveNorms, run_passes
from ampgraph.training.norm_gradient import norm_gradient
from tests.inductor_schedule import scheduled

BF16, F32 = torch.bfloat16, torch.float32
WIDTH = 32
Norm = Callable[[nn.ParameterDict, Tensor], Tensor]


def _layer_norm(p: nn.ParameterDict, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), p["w"], p["b"])


def _llama(p: nn.ParameterDict, x: Tensor) -> Tensor:
    hidden = x.to(F32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    return p["w"] * hidden.to(x.dtype)


def _gemma(p: nn.ParameterDict, x: Tensor) -> Tensor:
    wide = x.float()
    return ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)) * (1.0 + p["w"].float())).type_as(
        x
    )


def _power(p: nn.ParameterDict, x: Tensor) -> Tensor:
    return x * torch.pow((x * x).mean(-1, True) + 1e-6, -0.5) * p["w"]


NORMS: dict[str, Norm] = {
    "layer norm": _layer_norm,
    "layer norm without bias": lambda p, x: F.layer_norm(x, (WIDTH,), p["w"]),
    "layer norm without weight": lambda p, x: F.layer_norm(x, (WIDTH,)),
    "layer norm over two": lambda p, x: F.layer_norm(x, (3, WIDTH), p["w"].expand(3, -1).contiguous()),
    "layer norm of a view": lambda p, x: F.layer_norm(x.view(-1, WIDTH), (WIDTH,), p["w"]).view(x.shape),
    "rms norm": lambda p, x: F.rms_norm(x, (WIDTH,), p["w"], 1e-6),
    "rms norm without weight": lambda p, x: F.rms_norm(x, (WIDTH,)),
    "Llama's": _llama,
    "Gemma's": _gemma,
    "with a power": _power,
    "with a square": lambda p, x: torch.rsqrt(x.square().mean((-1,), True) + 1e-5) * x,
}


class Block(nn.Module):
    """A residual block with a norm in front, and a loss."""

    def __init__(self, norm: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.first, self.last = norm, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p = nn.ParameterDict({"w": torch.rand(WIDTH) + 0.5, "b": torch.randn(WIDTH) / 4})
        self.register_buffer("direction", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        y = x + self.last(NORMS[self.norm](self.p, x))
        return (y * self.direction).mean()


X = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(1))
POLICY = Policy(dtype=BF16, loss_scale=NoLossScale())
WIDE = POLICY.replace(save_norms_low=False)


def converted(model: nn.Module, policy: Policy = POLICY, backend: str = "aot_eager", x: Tensor = X):
    return ampgraph.convert(model, (x,), policy=policy, backend=backend)


def gradients(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Returns the relative error of all gradients together."""
    return math.sqrt(
        sum(float((found[n] - true[n]).norm() ** 2) for n in true)
        / sum(float(t.norm() ** 2) for t in true.values())
    )


@cache
def graphs(norm: str) -> dict[str, torch.fx.GraphModule]:
    """Returns training graphs over the same parameters; they run op by op."""
    model, rule = Block(norm), POLICY.replace(ops=OpLists.torch(), placement="autocast", weight_copies=False)
    policies = {"low": POLICY.replace(weight_copies=False), "wide": WIDE.replace(weight_copies=False)}
    made = {name: converted(model, policy) for name, policy in {**policies, "autocast": rule}.items()}
    assert {name: len(amp.plan.saved_low) for name, amp in made.items()} == {
        "low": 1,
        "wide": 0,
        "autocast": 0,
    }
    found = {name: amp.training_graph for name, amp in made.items()}
    return {**found, "float32": model}  # type: ignore[dict-item]


@pytest.mark.parametrize("norm", NORMS)
def test_forward_is_the_same_and_gradients_are_as_near_as_autocasts(norm: str) -> None:
    found, model = graphs(norm), graphs(norm)["float32"]
    ratios = []
    for seed in range(12):
        model.load_state_dict(Block(norm, seed).state_dict())
        x = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
        assert torch.equal(found["low"](x), found["wide"](x))
        true = gradients(model, x)
        low, rule = (error(_through(found[kind], model, x), true) for kind in ("low", "autocast"))
        assert low < 2 * rule
        ratios.append(low / rule)
    assert statistics.geometric_mean(ratios) < 1.1


def _through(graph: nn.Module, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    graph(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("norm", NORMS)
def test_torch_compile_takes_the_calls(norm: str) -> None:
    model = Block(norm)
    amp = converted(model)
    assert len(amp.plan.saved_low) == 1
    found, wanted = gradients(amp), gradients(amp.training_graph)
    assert found.keys() == wanted.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("is_centered", [True, False])
@pytest.mark.parametrize("dims", [1, 2])
def test_gradient_and_second_derivative_are_those_of_the_norm(dims: int, is_centered: bool) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        over, given, w = tuple(range(-dims, 0)), x.detach(), weight.detach()
        shifted = given - given.mean(over, keepdim=True) if is_centered else given
        inverse = (shifted.square().mean(over, keepdim=True) + 0.1).rsqrt()
        result = shifted * inverse * w + (0 if bias is None else bias.detach())
        arguments = x, weight, bias, result, shifted * inverse, inverse
        return norm_gradient(*arguments, dims, is_centered, torch.float64)

    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(x.shape[-dims:], dtype=torch.float64, requires_grad=True)
    bias = torch.randn(x.shape[-dims:], dtype=torch.float64, requires_grad=True)
    given = (x, weight, bias) if is_centered else (x, weight)
    assert torch.autograd.gradcheck(norm, given)
    assert torch.autograd.gradgradcheck(norm, given)


@pytest.mark.parametrize("frozen", ["w", "b", "first.weight"])
def test_frozen_inputs_have_no_gradient(frozen: str) -> None:
    model = Block("layer norm")
    parameters = {**dict(model.named_parameters()), **dict(model.p.items())}
    parameters[frozen].requires_grad_(False)
    found = _through(converted(model).training_graph, model, X)
    true = gradients(copy.deepcopy(model))
    assert found.keys() == true.keys()
    assert error(found, true) < 0.02


class Once(nn.Module):
    """One norm between two linear layers."""

    def __init__(self, body: Callable[[Once, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.last = body, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p = nn.ParameterDict({"w": torch.ones(WIDTH), "b": torch.zeros(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _shared_values(m: Once, x: Tensor) -> Tensor:
    x = x + m.first(x)
    normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.last(m.p["w"] * normalized).sum() + normalized.exp().sum()


def _over_the_batch(m: Once, x: Tensor) -> Tensor:
    x = x + m.first(x)
    return m.last(m.p["w"] * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)))


def _repeated(m: Once, x: Tensor) -> Tensor:
    x = x + m.first(x)
    normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.last(normalized * torch.ones(2, 1, 1, 1))


def _without_gradients(m: Once, x: Tensor) -> Tensor:
    return m.last(_layer_norm(m.p, x.cumsum(-1)))


def _without_gradient_of_the_mean(m: Once, x: Tensor) -> Tensor:
    x = x + m.first(x)
    with torch.no_grad():
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.last(m.p["w"] * (x * inverse))


def _own_weight(m: Once, x: Tensor) -> Tensor:
    x = x + m.first(x)
    return m.last(x * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))


ELSEWHERE: dict[str, Callable[[Once, Tensor], Tensor]] = {
    "low input": lambda m, x: m.last(_layer_norm(m.p, m.first(x))),
    "low input, widened by the model": lambda m, x: m.last(_llama(m.p, m.first(x).float())),
    "the model's own input": lambda m, x: m.last(_layer_norm(m.p, x)),
    "a view of the model's own input": lambda m, x: m.last(_layer_norm(m.p, x.view(-1, WIDTH))),
    "float32 readers": lambda m, x: _layer_norm(m.p, x + m.first(x)).exp(),
    "values with another reader": _shared_values,
    "mean over the batch": _over_the_batch,
    "a weight that repeats the values": _repeated,
    "mean without gradients": _without_gradient_of_the_mean,
    "its input as weight": _own_weight,
    "its weight as bias": lambda m, x: m.last(F.layer_norm(x + m.first(x), (WIDTH,), m.p["w"], m.p["w"])),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_other_norms_save_float32(where: str) -> None:
    assert converted(Once(ELSEWHERE[where])).plan.saved_low == ()


@pytest.mark.parametrize("where", ["mean without gradients", "its input as weight", "its weight as bias"])
def test_gradients_of_what_only_looks_like_a_norm(where: str) -> None:
    model = Once(lambda m, x: ELSEWHERE[where](m, x).square().mean())
    assert error(gradients(converted(model)), gradients(copy.deepcopy(model))) < 0.02


def test_norms_that_no_gradient_reaches_save_nothing() -> None:
    model = Once(_without_gradients)
    for parameter in model.p.values():
        parameter.requires_grad_(False)
    assert converted(model).plan.saved_low == ()


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        (POLICY, "eager"),
        (WIDE, "aot_eager"),
        (POLICY.replace(level="O0"), "aot_eager"),
        (POLICY.replace(placement="autocast"), "aot_eager"),
        (POLICY.replace(rules={"node:layer_norm*": "low"}), "aot_eager"),
    ],
)
def test_policies_without_it(policy: Policy, backend: str) -> None:
    amp = converted(Block("layer norm"), policy, backend)
    assert amp.plan.saved_low == ()
    assert "norm_gradient" not in amp.training_graph.code


def test_explained_with_what_it_saves() -> None:
    low, wide = (converted(Block("layer norm"), policy) for policy in (POLICY, WIDE))
    told, plain = ampgraph.explain(low), ampgraph.explain(wide)
    reasons = {node.name: node.reason for node in told.nodes}
    assert "; its backward reads the normalized values in bfloat16" in reasons["layer_norm"]
    assert told.totals.fused_saved == plain.totals.fused_saved - 2 * X.numel()
    assert told.totals.fused_forward + told.totals.fused_backward <= (
        plain.totals.fused_forward + plain.totals.fused_backward
    )
    assert told.under(WIDE).totals == plain.totals
    shares = told.shares()
    assert list(shares)[-2:] == ["placement", "saved norms"]
    assert shares["placement"].fused_saved == plain.totals.fused_saved
    assert shares["saved norms"].fused_saved == told.totals.fused_saved
    assert "+ norms saved low" in told.table(peers=True)


def test_graph_for_people_keeps_the_norm() -> None:
    amp = converted(Block("layer norm"))
    assert "layer_norm.default" in amp.graph_module.code
    assert "norm_gradient" not in amp.graph_module.code
    assert "norm_gradient" in amp.training_graph.code
    assert "norm_gradient" not in amp.inference_graph.code


def test_pass_leaves_what_is_no_norm_any_more() -> None:
    """Someone may have edited the graph since it was planned."""
    graph_module = copy.deepcopy(converted(Block("layer norm")).graph_module)
    node = next(n for n in graph_module.graph.nodes if n.name == "layer_norm")
    node.target, node.args = torch.ops.aten.tanh.default, (node.args[0],)
    assert not run_passes(graph_module, (SaveNorms(("layer_norm", "gone"), BF16),)).modified


@pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_trains_like_float32_with_loss_scale_and_checkpoint(args: tuple | None, dtype: torch.dtype) -> None:
    model = Block("layer norm")
    true = gradients(copy.deepcopy(model))
    amp = ampgraph.convert(model, args, dtype=dtype, backend="aot_eager")
    checkpoint(amp, X, use_reentrant=False).backward()
    assert amp.plan.saved_low == ("layer_norm",)
    found = {name: p.grad for name, p in model.named_parameters()}
    assert error(found, true) < 0.02
    saved = [n.meta["val"] for n in amp.backward_graph.graph.find_nodes(op="placeholder")]
    assert {t.dtype for t in saved if t.shape == X.shape} == {dtype}


def test_sizes_may_be_dynamic() -> None:
    model = Block("rms norm")
    shapes = {"x": {0: torch.export.Dim("batch", min=2)}}
    amp = ampgraph.convert(model, (X,), policy=POLICY, backend="aot_eager", dynamic_shapes=shapes)
    for x in (X, torch.randn(7, 3, WIDTH)):
        true = gradients(copy.deepcopy(model), x)
        assert error(gradients(amp, x), true) < 0.02
    assert amp.plan.saved_low == ("rms_norm",)


def test_copies_and_programs() -> None:
    amp = converted(Block("Llama's"))
    assert error(gradients(copy.deepcopy(amp)), gradients(amp)) == 0
    assert torch.equal(copy.deepcopy(amp.graph_module)(X), amp(X))
    assert pickle.loads(pickle.dumps(amp.plan)).saved_low == ("mul_1",)
    program = torch.export.export(amp.graph_module, (X,), strict=True)
    assert "norm_gradient" not in program.graph_module.code


def test_compiler_saves_low_values_in_the_kernels_that_it_had() -> None:
    """Schedules of Inductor; nothing runs."""
    found = {}
    for name, policy in {"low": POLICY, "wide": WIDE}.items():
        graph = converted(Block("layer norm"), policy.replace(weight_copies=False)).training_graph
        found[name] = scheduled(lambda x, graph=graph: graph(x), X)
    low, wide = found["low"], found["wide"]
    assert low.saved <= wide.saved - 2 * X.numel()
    assert sum(low.bytes) < sum(wide.bytes)
    assert len(low.forward) == len(wide.forward)
