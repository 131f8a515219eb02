"""Weight gradients in float32 straight from the products: values, choice, and every way to run a graph.

No kernel for CPUs writes float32 for low factors. Tests add one, and let the plan take it.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy
from ampgraph.passes import choose_gradients
from ampgraph.runtime.boundary import gradient_passes
from ampgraph.step.trace_step import trace_step
from ampgraph.training import gradient_boundary
from ampgraph.training.new_gradients import is_new

BF16, F32 = torch.bfloat16, torch.float32
POLICY = Policy(dtype=BF16, loss_scale=NoLossScale())
NARROW = POLICY.replace(wide_weight_gradients=False)
X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def wide_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives CPUs the kernel that CUDA has."""
    monkeypatch.setattr(choose_gradients, "writes_wide_products", lambda device: True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda left, right, dtype: left.to(dtype) @ right.to(dtype), "CPU")
    yield
    library._destroy()
    torch._dynamo.reset()


class Net(nn.Module):
    """Products of every form, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(24, 8, bias=False)
        self.middle = nn.Parameter(torch.randn(32, 24) / 6)
        self.shift, self.into = nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(24, 24) / 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x)) @ self.middle
        x = torch.addmm(self.shift, x.reshape(-1, 24), self.into).view(x.shape)
        return self.last(x.relu()).square().mean()


def converted(model: nn.Module, policy: Policy = POLICY, backend: str = "aot_eager", x: Tensor = X):
    return ampgraph.convert(model, (x,), policy=policy, backend=backend)


def gradients(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((found[n] - true[n]).norm() ** 2) for n in true))


def is_low(tensor: Tensor) -> bool:
    return torch.equal(tensor, tensor.to(BF16).to(F32))


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "casts"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_have_exact_sums_and_all_else_is_the_same(level: str, copies: bool) -> None:
    policy = POLICY.replace(level=level, weight_copies=copies)
    wide, narrow = converted(Net(), policy), converted(Net(), policy.replace(wide_weight_gradients=False))
    assert len(wide.plan.wide_gradients) == 4
    assert narrow.plan.wide_gradients == ()
    assert torch.equal(wide(X), narrow(X))
    found, rounded = gradients(wide), gradients(narrow)
    for name, gradient in found.items():
        is_weight = gradient.dim() == 2
        assert is_low(rounded[name]) or not is_weight
        assert is_low(gradient) is not is_weight or not is_weight
        # The same sums, unrounded.
        near = {"rtol": 2**-8, "atol": 1e-6} if is_weight else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(gradient, rounded[name], **near)
    true = gradients(Net())
    assert error(found, true) <= error(rounded, true)


def test_backward_has_no_cast_of_a_weight_gradient() -> None:
    amp = converted(Net())
    gradients(amp)
    nodes = amp.backward_graph.graph.nodes
    assert sum(node.target is torch.ops.aten.mm.dtype for node in nodes) == 4
    casts = [n for n in nodes if n.target is torch.ops.aten._to_copy.default]
    assert not [n for n in casts if n.args[0].target is torch.ops.aten.mm.default]


@pytest.fixture
def any_size_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets eager mode choose small products too."""
    monkeypatch.setattr(choose_gradients, "EAGER_MULTIPLICATIONS", 1)


@pytest.mark.usefixtures("any_size_eagerly")
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "casts"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_eager_mode_has_exact_sums_with_a_loss_scale_too(
    dtype: torch.dtype, level: str, copies: bool
) -> None:
    policy = Policy(dtype=dtype, level=level, weight_copies=copies)
    wide = converted(Net(), policy, "eager")
    narrow = converted(Net(), policy.replace(wide_weight_gradients=False), "eager")
    assert len(wide.plan.wide_gradients) == 4
    assert narrow.plan.cost.backward - wide.plan.cost.backward == 4 * sum(
        p.numel() for p in wide.parameters() if p.dim() == 2
    )
    assert torch.equal(wide(X), narrow(X))
    found, rounded = gradients(wide), gradients(narrow)
    for name, gradient in found.items():
        if gradient.dim() == 2:
            torch.testing.assert_close(gradient, rounded[name], rtol=2**-8, atol=1e-6)
            assert not torch.equal(gradient, rounded[name])
        else:
            assert torch.equal(gradient, rounded[name])
    true = gradients(Net())
    assert error(found, true) <= error(rounded, true)


@pytest.mark.usefixtures("any_size_eagerly")
def test_an_overflow_in_a_wide_gradient_skips_the_step() -> None:
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=2.0**15))
    amp = converted(Net(), policy, "eager")
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = {name: p.detach().clone() for name, p in amp.named_parameters()}
    (amp(X) * 1e6).backward()
    optimizer.step()
    amp.scaler.update()
    assert all(torch.equal(p, before[name]) for name, p in amp.named_parameters())
    assert amp.scaler.get_scale() == 2.0**14
    optimizer.zero_grad()
    amp(X).backward()
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in amp.named_parameters())


def without_biases() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 8, bias=False))


@pytest.mark.usefixtures("any_size_eagerly")
@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_large_new_gradients_are_unscaled_where_they_are(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=2.0**10))
    found, in_place = {}, []
    kernel = gradient_boundary.unscaled_in_place
    monkeypatch.setattr(
        gradient_boundary, "unscaled_in_place", lambda *args: in_place.append(args) or kernel(*args)
    )
    for least in (1, 2**60):
        monkeypatch.setattr(gradient_boundary, "IN_PLACE_ELEMENTS", least)
        amp = converted(without_biases(), policy, "eager")
        optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
        (factor * amp(X).square().mean()).backward()
        assert bool(in_place) == (least == 1)
        in_place.clear()
        gradients = [p.grad.clone() for p in amp.parameters()]
        amp.scaler.step(optimizer)
        amp.scaler.update()
        found[least] = [*gradients, *amp.parameters(), torch.tensor(amp.scaler.get_scale())]
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert found[1][-1] == (2.0**10 if factor == 1 else 2.0**9)


@pytest.mark.usefixtures("any_size_eagerly")
def test_sums_of_new_gradients_and_graphs_of_gradients_are_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_boundary, "IN_PLACE_ELEMENTS", 1)
    amp = converted(without_biases(), Policy(dtype=torch.float16), "eager")
    loss = amp(X).square().mean()
    loss.backward(retain_graph=True)
    (first,) = torch.autograd.grad(loss, amp[0].weight, retain_graph=True)
    assert torch.equal(first, amp[0].weight.grad)
    (second,) = torch.autograd.grad(loss, amp[0].weight, create_graph=True)
    assert second.requires_grad
    torch.testing.assert_close(second.detach(), first, rtol=2**-9, atol=1e-6)
    amp(X).square().mean().backward()
    assert torch.equal(amp[0].weight.grad, 2 * first)
    assert not is_new(amp[0].weight.grad)


@pytest.mark.usefixtures("any_size_eagerly")
@pytest.mark.parametrize("is_batched", [True, False])
def test_batches_of_gradients_in_eager_mode(is_batched: bool) -> None:
    """Batching rules know no wide product."""
    amp = converted(Net(), POLICY, "eager")
    weight, seeds = amp.first.weight, torch.tensor([1.0, 2.0])
    if is_batched:
        (found,) = torch.autograd.grad(amp(X), weight, seeds, is_grads_batched=True)
    else:
        found = torch.stack([torch.autograd.grad(amp(X), weight, seed)[0] for seed in seeds])
    assert found.dtype == F32
    torch.testing.assert_close(found[1], 2 * found[0])
    torch.testing.assert_close(found[0], gradients(Net())["first.weight"], rtol=0.1, atol=0.03)


@pytest.mark.parametrize("rows", [15, 16])
def test_eager_mode_takes_products_from_a_number_of_multiplications_on(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_gradients, "EAGER_MULTIPLICATIONS", 16 * 24 * 8)
    amp = converted(nn.Linear(24, 8), POLICY, "eager", torch.randn(rows, 24))
    assert len(amp.plan.wide_gradients) == (rows == 16)


class Tied(nn.Module):
    """A weight that two products read, one that a sum reads too, one of odd width, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.added = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.odd, self.frozen = nn.Linear(16, 9), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.alone = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x)) + self.frozen(x)
        return self.odd(self.alone(self.added(x) + self.added.weight.sum(0))).square().mean()


def test_only_weights_with_one_reader_and_aligned_rows() -> None:
    amp = converted(Tied())
    (name,) = amp.plan.wide_gradients
    told = {row.name: row for row in ampgraph.explain(amp).nodes}
    assert told[name].module == "alone"
    assert "its kernel gives the gradient of the weight in float32" in told[name].reason
    found = gradients(amp)
    assert not is_low(found["alone.weight"])
    assert is_low(found["twice.weight"])
    assert is_low(found["odd.weight"])


@pytest.mark.parametrize(
    "policy",
    [
        NARROW,
        POLICY.replace(objective="traffic"),
        POLICY.replace(placement="autocast"),
        POLICY.replace(loss_scale=DynamicLossScale()),
        Policy(dtype=torch.float16),
        POLICY.replace(level="O0"),
    ],
    ids=["off", "eager", "autocast", "scaled", "float16", "O0"],
)
def test_not_chosen(policy: Policy) -> None:
    assert converted(Net(), policy).plan.wide_gradients == ()


def test_only_on_devices_that_have_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert converted(Net()).plan.wide_gradients == ()
    assert choose_gradients.writes_wide_products(torch.device("cuda", 1))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not choose_gradients.writes_wide_products(torch.device("cuda"))


def test_max_autotune_keeps_the_cast_for_its_own_kernels() -> None:
    modes = (None, "reduce-overhead", "max-autotune-no-cudagraphs")
    made = {
        mode: ampgraph.convert(Net(), (X,), policy=POLICY, backend="inductor", mode=mode) for mode in modes
    }
    kinds = {
        mode: [step.name for step in gradient_passes(amp.plan, amp.graph_module, amp.options)]
        for mode, amp in made.items()
    }
    assert [*kinds.values()] == [["widen_gradients"], ["widen_gradients"], []]
    told = {mode: ampgraph.explain(amp).why("linear") for mode, amp in made.items()}
    assert ["gradient of the weight in float32" in words for words in told.values()] == [True, True, False]


@pytest.mark.parametrize("way", ["convert", "torch.compile"])
def test_captured_just_in_time(way: str) -> None:
    model = Net()
    if way == "convert":
        run: Callable = ampgraph.convert(model, policy=POLICY, backend="aot_eager")
    else:
        options = {"dtype": BF16, "loss_scale": NoLossScale(), "backend": "aot_eager"}
        run = torch.compile(model, backend="ampgraph", options=options)
    run(X).backward()
    ahead = gradients(converted(Net()))
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, ahead[name]), name


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_blocks_that_are_alike_share_one_graph() -> None:
    whole, model = converted(Blocks()), Blocks()
    ampgraph.convert_blocks(model, "blocks.*", policy=POLICY, backend="aot_eager")
    found, wanted = gradients(model), gradients(whole)
    assert not any(is_low(g) for g in found.values() if g.dim() == 2)
    assert len(found) == len(wanted) == 12


def test_second_derivatives() -> None:
    """torch has no derivative of a wide product, so a backward that needs one takes the low product."""
    first, second = [], []
    for policy in (POLICY, NARROW):
        amp = converted(Net(), policy.replace(objective="fused"), "eager")
        weight = amp.first.weight
        (gradient,) = torch.autograd.grad(amp(X), weight, create_graph=True)
        first.append(gradient.detach())
        second.append(torch.autograd.grad(gradient.square().sum(), weight)[0])
    assert torch.equal(*first)
    # Its own backward has wide products again.
    torch.testing.assert_close(*second, rtol=2**-7, atol=2**-8 * float(second[1].abs().max()))


def _loss(amp: nn.Module, x: Tensor) -> Tensor:
    return amp(x)


@pytest.mark.parametrize(("backend", "count"), [("inductor", 0), ("aot_eager", 4)])
def test_a_step_whose_update_fuses_reads_low_gradients(backend: str, count: int) -> None:
    amp = converted(Net(), backend=backend)
    amp.training_graph  # noqa: B018  # made before a trace
    optimizer = torch.optim.AdamW(amp.parameters(), fused=True)
    for p in amp.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    nodes = trace_step(amp, optimizer, _loss, None, (X,), {}).graph_module.graph.nodes
    assert sum(node.target is torch.ops.aten.mm.dtype for node in nodes) == count


def test_other_sizes_frozen_weights_and_empty_batches() -> None:
    amp, model = converted(Net()), Net()
    for x in (X[:1], torch.randn(7, 2, 16), torch.zeros(2, 0, 16)):
        for name, gradient in gradients(amp, x).items():
            true = gradients(model, x)[name]
            torch.testing.assert_close(gradient, true, rtol=0.1, atol=0.03, equal_nan=True)
    amp.middle.requires_grad_(False)
    assert "middle" not in gradients(amp)
    amp.middle.requires_grad_(True)
    assert "middle" in gradients(amp)


def test_explained_by_shares_and_kept_in_copies() -> None:
    amp, narrow = converted(Net()), converted(Net(), NARROW)
    told, plain = ampgraph.explain(amp), ampgraph.explain(narrow)
    elements = sum(p.numel() for p in amp.parameters() if p.dim() == 2)
    assert told.totals.fused_backward == plain.totals.fused_backward - 4 * elements
    assert told.under(NARROW).totals == plain.totals
    shares = told.shares()
    assert list(shares)[-2:] == ["placement", "weight gradients"]
    assert shares["placement"] == plain.totals
    assert "+ wide gradients" in told.table(peers=True)
    assert pickle.loads(pickle.dumps(amp.plan)).wide_gradients == amp.plan.wide_gradients
    for name, gradient in gradients(copy.deepcopy(amp)).items():
        assert torch.equal(gradient, gradients(amp)[name])
    assert "weight_gradient" not in amp.graph_module.code
