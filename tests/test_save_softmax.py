"""Softmax whose backward reads low probabilities: where, the same forward, and gradients like autocast's."""

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
from ampgraph.passes import SaveSoftmax, run_passes
from ampgraph.training.softmax_gradient import softmax_gradient
from tests.inductor_schedule import scheduled

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WIDTH, HEADS, LENGTH = 32, 2, 12
# Makes probabilities of scores.
Shares = Callable[[nn.Module, Tensor], Tensor]


def _masked(m: nn.Module, scores: Tensor) -> Tensor:
    mask = torch.triu(torch.full((LENGTH, LENGTH), -torch.inf), 1)
    return (scores + mask).softmax(-1)


def _like_llama(m: nn.Module, scores: Tensor) -> Tensor:
    shares = F.softmax(scores, dim=-1, dtype=F32).to(scores.dtype)
    return F.dropout(shares, p=0.0, training=m.training)


SHARES: dict[str, Shares] = {
    "plain": lambda m, scores: torch.softmax(scores, -1),
    "with a learned bias": lambda m, scores: F.softmax(scores + m.bias, dim=-1),
    "masked": _masked,
    "like Llama's": _like_llama,
    "without its dropout": lambda m, scores: F.dropout(scores.softmax(dim=-1), 0.3, training=False),
    "peaked": lambda m, scores: torch.softmax(scores + 10 * torch.eye(LENGTH).roll(1, 0), -1),
    "another dimension": lambda m, scores: (
        scores.transpose(-1, -2).softmax(-2).transpose(-1, -2).contiguous()
    ),
}


class Attention(nn.Module):
    """Attention written as single ops, in a residual block with a loss."""

    def __init__(self, shares: str | Shares, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shares = SHARES[shares] if isinstance(shares, str) else shares
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("direction", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        shares = self.shares(self, q @ k.transpose(-1, -2))
        y = x + self.out((shares @ v).transpose(1, 2).flatten(2))
        return (y * self.direction).mean()


X = torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
POLICY = Policy(dtype=BF16, loss_scale=NoLossScale())
WIDE = POLICY.replace(save_softmax_low=False)


def converted(model: nn.Module, policy: Policy = POLICY, backend: str = "aot_eager", x: Tensor = X):
    return ampgraph.convert(model, (x,), policy=policy, backend=backend)


def gradients(run: nn.Module, x: Tensor = X, model: nn.Module | None = None) -> dict[str, Tensor]:
    model = model or run
    model.zero_grad()
    run(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Returns the relative error of all gradients together."""
    return math.sqrt(
        sum(float((found[n] - true[n]).norm() ** 2) for n in true)
        / sum(float(t.norm() ** 2) for t in true.values())
    )


@cache
def graphs(shares: str) -> dict[str, nn.Module]:
    """Returns training graphs over the same parameters; they run op by op."""
    model, rule = Attention(shares), POLICY.replace(ops=OpLists.torch(), placement="autocast")
    policies = {"low": POLICY, "wide": WIDE, "autocast": rule}
    made = {name: converted(model, p.replace(weight_copies=False)) for name, p in policies.items()}
    saved = {name: len(amp.plan.saved_softmax) for name, amp in made.items()}
    assert saved == {"low": 1, "wide": 0, "autocast": 0}
    return {**{name: amp.training_graph for name, amp in made.items()}, "float32": model}


@pytest.mark.parametrize("shares", [s for s in SHARES if s != "another dimension"])
def test_forward_is_the_same_and_gradients_are_as_near_as_autocasts(shares: str) -> None:
    found, model = graphs(shares), graphs(shares)["float32"]
    ratios = []
    for seed in range(12):
        model.load_state_dict(Attention(shares, seed).state_dict())
        x = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)) * (1 + seed / 4)
        assert torch.equal(found["low"](x), found["wide"](x))
        true = gradients(model, x)
        low, rule = (error(gradients(found[kind], x, model), true) for kind in ("low", "autocast"))
        assert low < 1.5 * rule
        ratios.append(low / rule)
    assert statistics.geometric_mean(ratios) < 1.1


@pytest.mark.parametrize("dim", [-1, 1])
def test_gradient_and_second_derivative_are_those_of_softmax(dim: int) -> None:
    def softmax(x: Tensor) -> Tensor:
        return softmax_gradient(x, x.detach().softmax(dim), dim, torch.float64)

    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(softmax, (x,))
    assert torch.autograd.gradgradcheck(softmax, (x,))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_equal_gradients_of_a_row_cancel(dtype: torch.dtype) -> None:
    """The rounded probabilities of a row do not sum to 1."""
    x = torch.randn(64, 50, requires_grad=True)
    softmax_gradient(x, x.detach().softmax(-1), -1, dtype).sum().backward()
    assert x.grad.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients_have_the_dtype_of_the_scores(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    softmax_gradient(x, x.detach().softmax(-1, dtype=F32), -1, dtype).square().sum().backward()
    true = x.detach().float().requires_grad_()
    true.softmax(-1).square().sum().backward()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.float(), true.grad, rtol=0.02, atol=0.004)


def _with_dropout(m: nn.Module, scores: Tensor) -> Tensor:
    return F.dropout(scores.softmax(-1), 0.1, training=True)


def _wide_reader(m: nn.Module, scores: Tensor) -> Tensor:
    return scores.softmax(-1).exp().log()


ELSEWHERE: dict[str, Shares] = {
    "behind a dropout": _with_dropout,
    "float32 readers": _wide_reader,
    "a view in between": SHARES["another dimension"],
    "log softmax": lambda m, scores: scores.log_softmax(-1),
    "a mask without gradients": lambda m, scores: scores * m.bias.detach().cumsum(-1).softmax(-1),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_other_softmax_ops_save_what_they_did(where: str) -> None:
    assert converted(Attention(ELSEWHERE[where])).plan.saved_softmax == ()


def _without_gradients(m: nn.Module, scores: Tensor) -> Tensor:
    with torch.no_grad():
        return scores.softmax(-1)


def test_no_gradient_passes_a_softmax_without_gradients() -> None:
    model = Attention(_without_gradients)
    amp = converted(model)
    assert amp.plan.saved_softmax == ()
    assert error(gradients(amp), gradients(copy.deepcopy(model))) < 0.02


class Long(nn.Module):
    """Weights over many positions."""

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        return (x @ x.transpose(0, 1)).softmax(-1) @ v


@pytest.mark.parametrize(("dtype", "length", "count"), [(F16, 16385, 0), (F16, 16384, 1), (BF16, 16385, 1)])
def test_float16_holds_the_shares_of_a_limited_number(dtype: torch.dtype, length: int, count: int) -> None:
    x, v = torch.empty(length, 8, requires_grad=True), torch.empty(length, 8)
    policy = POLICY.replace(dtype=dtype, objective="fused")
    amp = ampgraph.convert(Long(), (x, v), policy=policy)
    assert len(amp.plan.saved_softmax) == count


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        (POLICY, "eager"),
        (WIDE, "aot_eager"),
        (POLICY.replace(level="O0"), "aot_eager"),
        (POLICY.replace(placement="autocast"), "aot_eager"),
        (POLICY.replace(rules={"node:softmax*": "low"}), "aot_eager"),
    ],
)
def test_policies_without_it(policy: Policy, backend: str) -> None:
    amp = converted(Attention("plain"), policy, backend)
    assert amp.plan.saved_softmax == ()
    assert "softmax_gradient" not in amp.training_graph.code


def test_explained_with_what_it_saves() -> None:
    low, wide = (converted(Attention("plain"), policy) for policy in (POLICY, WIDE))
    told, plain = ampgraph.explain(low), ampgraph.explain(wide)
    assert "; its backward reads the probabilities in bfloat16" in told.why("softmax")
    assert told.totals.fused_saved == plain.totals.fused_saved - 2 * len(X) * HEADS * LENGTH**2
    assert told.totals.fused_backward <= plain.totals.fused_backward
    assert told.under(WIDE).totals == plain.totals
    shares = told.shares()
    assert list(shares)[-2:] == ["placement", "saved softmax"]
    assert shares["placement"].fused_saved == plain.totals.fused_saved
    assert "+ softmax saved low" in told.table(peers=True)


def test_graph_for_people_keeps_the_softmax() -> None:
    amp = converted(Attention("plain"))
    assert "softmax_gradient" not in amp.graph_module.code
    assert "softmax_gradient" in amp.training_graph.code
    assert "softmax_gradient" not in amp.inference_graph.code


def test_pass_leaves_what_is_no_softmax_any_more() -> None:
    """Someone may have edited the graph since it was planned."""
    graph_module = copy.deepcopy(converted(Attention("plain")).graph_module)
    node = next(n for n in graph_module.graph.nodes if n.name == "softmax")
    node.target, node.args = torch.ops.aten.tanh.default, (node.args[0],)
    assert not run_passes(graph_module, (SaveSoftmax(("softmax", "gone"), BF16),)).modified


@pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_trains_like_float32_with_loss_scale_and_checkpoint(args: tuple | None, dtype: torch.dtype) -> None:
    model = Attention("with a learned bias")
    true = gradients(copy.deepcopy(model))
    amp = ampgraph.convert(model, args, dtype=dtype, backend="aot_eager")
    checkpoint(amp, X, use_reentrant=False).backward()
    assert amp.plan.saved_softmax == ("softmax",)
    assert error({name: p.grad for name, p in model.named_parameters()}, true) < 0.02
    saved = [n.meta["val"] for n in amp.backward_graph.graph.find_nodes(op="placeholder")]
    assert {t.dtype for t in saved if t.numel() == len(X) * HEADS * LENGTH**2} == {dtype}


def test_sizes_may_be_dynamic() -> None:
    model = Attention("plain")
    shapes = {"x": {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)}}
    amp = ampgraph.convert(model, (X,), policy=POLICY, backend="aot_eager", dynamic_shapes=shapes)
    for x in (X, torch.randn(7, 9, WIDTH)):
        assert error(gradients(amp, x), gradients(copy.deepcopy(model), x)) < 0.02
    assert amp.plan.saved_softmax == ("softmax",)


def test_copies_and_programs() -> None:
    amp = converted(Attention("plain"))
    assert error(gradients(copy.deepcopy(amp)), gradients(amp)) == 0
    assert pickle.loads(pickle.dumps(amp.plan)).saved_softmax == ("softmax",)
    program = torch.export.export(amp.graph_module, (X,), strict=True)
    assert "softmax_gradient" not in program.graph_module.code


def test_compiler_saves_no_scores() -> None:
    """Schedules of Inductor; nothing runs."""
    found = {}
    for name, policy in {"low": POLICY, "wide": WIDE}.items():
        graph = converted(Attention("masked"), policy.replace(weight_copies=False)).training_graph
        found[name] = scheduled(lambda x, graph=graph: graph(x), X)
    low, wide = found["low"], found["wide"]
    assert low.saved <= wide.saved - 2 * len(X) * HEADS * LENGTH**2
    assert sum(low.bytes) < sum(wide.bytes)
    assert len(low.forward) <= len(wide.forward)
