"""Masks of large numbers that a model makes and adds: they hide whole rows, whose scores must not be lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.testing import cast_map

LENGTH, WIDTH = 6, 16
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)) * 2
KEEP = torch.tensor([[True] * 4 + [False] * 2, [False] * LENGTH])
LATER = torch.full((LENGTH, LENGTH), -1e4).triu(1)
WINDOW = torch.full((LENGTH, LENGTH), -100.0).triu(1)
Masked = Callable[[Tensor, Tensor], Tensor]


EARLY = torch.full((LENGTH, LENGTH), -1e4).tril()


def _sinkhorn(scores: Tensor) -> Tensor:
    rows = columns = torch.zeros(scores.shape[:2])
    for _ in range(3):
        rows = -torch.logsumexp(scores + columns[:, None], 2)
        columns = -torch.logsumexp(scores + rows[:, :, None], 1)
    return scores + rows[:, :, None] + columns[:, None]


def _pairs(keep: Tensor) -> Tensor:
    return torch.einsum("bi,bj->bij", keep.float(), keep.float())


def _twice(scores: Tensor, keep: Tensor) -> Tensor:
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padding = torch.where(keep[:, None], 0.0, -2e4)
    return scores + (padding + later * -1e4)


def _written_out(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores + (~keep)[:, None] * -1e4
    return scores - scores.amax(-1, keepdim=True).detach()


MASKED: dict[str, Masked] = {
    "a product": lambda scores, keep: scores + (1.0 - keep.float())[:, None] * -1e4,
    "subtracted": lambda scores, keep: scores - (~keep).float()[:, None] * 1e4,
    "selected": lambda scores, keep: torch.where(keep[:, None], 0.0, -1e4) + scores,
    "in place": lambda scores, keep: scores.add_((~keep)[:, None] * -1e4),
    "two masks": _twice,
    "one after the other": lambda scores, keep: _twice(scores + (~keep)[:, None] * -1e4, keep),
    "bounded scores": lambda scores, keep: scores.tanh() * 5 + (~keep)[:, None] * -1e4,
    "before a softmax that is written out": _written_out,
}


class Attention(nn.Module):
    def __init__(self, masked: Masked) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked = masked
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.masked(self.q(x) @ self.k(x).transpose(1, 2), keep)
        if self.masked is _written_out:
            shares = scores.exp()
            return shares / shares.sum(-1, keepdim=True) @ self.v(x)
        return scores.softmax(-1) @ self.v(x)


def converted(masked: Masked, dtype: torch.dtype, **options) -> ampgraph.AmpModule:
    policy = Policy("O2", dtype=dtype, loss_scale=NoLossScale(), **options)
    return ampgraph.convert(Attention(masked), (X, KEEP), policy=policy)


def error(amp: ampgraph.AmpModule, masked: Masked) -> float:
    expected = Attention(masked).double()(X.double(), KEEP)
    return float((amp(X, KEEP) - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("masked", MASKED)
def test_a_row_that_is_hidden_attends_as_in_float32(masked: str, dtype: torch.dtype) -> None:
    assert error(converted(MASKED[masked], dtype), MASKED[masked]) < 8 * EPS[dtype]
    assert error(converted(MASKED[masked], dtype, hazards=False), MASKED[masked]) > 32 * EPS[dtype]


OF_INPUTS: dict[str, Masked] = {
    "a product": lambda scores, keep: scores + (1 - keep[:, None].float()) * -1e4,
    "of the other sign": lambda scores, keep: (keep[:, None].to(scores.dtype) - 1.0) * 1e4 + scores,
    "a sum": lambda scores, keep: scores + (keep.float() * 1e4 - 1e4).unsqueeze(1),
    "a quotient": lambda scores, keep: scores - (1 - keep[:, None].float()) / 1e-4,
    "clamped": lambda scores, keep: (scores + (1 - keep[:, None].float()) * -1e4).clamp(min=-3e38),
    "with a table": lambda scores, keep: scores + ((1 - keep[:, None].float()) * -1e4 + LATER),
    "of two rows": lambda scores, keep: scores + (1 - _pairs(keep)) * -1e4,
    "a power": lambda scores, keep: scores - 10.0 ** (1 - keep[:, None].float()) * 1e4,
    "a logarithm": lambda scores, keep: scores + keep[:, None].float().clamp(min=1e-30).log(),
    "a logarithm of a sum": lambda scores, keep: scores + (keep[:, None].float() + 1e-9).log(),
    "selected from two": lambda scores, keep: (
        scores + torch.where(LATER == 0, (1 - keep[:, None].float()) * -1e4, -2e4)
    ),
    "stacked": lambda scores, keep: (
        scores
        + torch.stack(
            [(1 - keep[:, None].float()).expand(-1, LENGTH, -1) * -1e4, LATER.expand(2, -1, -1)]
        ).sum(0)
    ),
    "both signs": lambda scores, keep: scores + torch.where(keep[:, None] > 0, 5000.0, -5000.0),
    "one after the other": lambda scores, keep: scores + EARLY * keep.amax() + LATER,
    "through logarithms of sums": lambda scores, keep: _sinkhorn(scores - (1 - keep[:, None].float()) * 1e4),
    "before a selection": lambda scores, keep: (scores + keep[:, None].float() * 1e3).sort(-1)[0],
    "what is seen": lambda scores, keep: scores + keep[:, None].float() * 100,
    "hidden by 100": lambda scores, keep: scores - (1 - keep[:, None].float()) * 100,
    "scaled by the sum": lambda scores, keep: torch.add(scores, 1 - keep[:, None].float(), alpha=-1e4),
    "subtracted and scaled": lambda scores, keep: torch.rsub(1 - keep[:, None].float(), scores, alpha=1e4),
    "multiplied by the sum": lambda scores, keep: torch.addcmul(
        scores, 1 - keep[:, None].float(), torch.ones(()), value=-1e4
    ),
    "between two numbers": lambda scores, keep: (
        scores + torch.lerp(torch.tensor(-1e4), torch.tensor(0.0), keep[:, None].float())
    ),
    "a power of a number": lambda scores, keep: scores - torch.pow(10.0, 4 * (1 - keep[:, None].float())),
    "from a table": lambda scores, keep: scores + torch.tensor([-1e4, 0.0])[keep[:, None].long()],
    "gathered": lambda scores, keep: (
        scores + torch.tensor([-1e4, 0.0]).expand(2, 2).gather(1, keep.long())[:, None]
    ),
}


@pytest.mark.parametrize("given", [torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("masked", OF_INPUTS)
def test_masks_that_are_inputs_have_any_dtype(masked: str, backend: str, given: torch.dtype) -> None:
    """Nothing is known of the values of an input but the number that multiplies them."""
    model, keep = Attention(OF_INPUTS[masked]), KEEP.to(given)
    for dtype in EPS:
        policy = Policy("O2", dtype=dtype, loss_scale=NoLossScale())
        graph = ampgraph.convert(model, (X, keep), policy=policy, backend=backend).training_graph
        found = graph(X, keep)
        expected = model(X, keep)
        assert float((found - expected).detach().norm() / expected.detach().norm()) < 8 * EPS[dtype]


def test_the_reason_names_the_mask() -> None:
    amp = converted(MASKED["a product"], torch.bfloat16)
    decisions = {name: amp.plan.decisions[name] for name in ("add", "mul")}
    assert decisions["add"].dtype is torch.float32
    assert decisions["add"].reason == "adds the mask 'mul': bfloat16 rounds such sums by up to 39.1"


OTHERS: dict[str, Callable[[nn.Module], Masked]] = {
    "a windowed transformer's": lambda model: lambda scores, keep: scores + model.window[None],
    "short distances": lambda model: lambda scores, keep: scores + torch.arange(6.0),
    "learned": lambda model: lambda scores, keep: scores + model.biases[:, :LENGTH],
    "a scaled learned table": lambda model: lambda scores, keep: scores + 16 * model.biases.sigmoid(),
    "bounded on both sides": lambda model: lambda scores, keep: scores + 50 * (scores / 50).tanh(),
    "filled": lambda model: lambda scores, keep: scores.masked_fill(~keep[:, None], -1e4),
}


class WithTables(Attention):
    """Its tables are a buffer, each row of which shows something, and a parameter of large numbers."""

    def __init__(self, masked: Callable[[nn.Module], Masked]) -> None:
        super().__init__(masked(self))
        self.register_buffer("window", WINDOW)
        self.biases = nn.Parameter(torch.linspace(0.0, 200.0, LENGTH**2).view(LENGTH, LENGTH))


@pytest.mark.parametrize("masked", OTHERS)
def test_other_sums_run_low(masked: str) -> None:
    policies = [Policy("O2", dtype=torch.bfloat16, hazards=on) for on in (True, False)]
    maps = [cast_map(ampgraph.convert(WithTables(OTHERS[masked]), (X, KEEP), policy=p)) for p in policies]
    assert maps[0] == maps[1]


def test_a_table_that_hides_a_whole_row_is_a_mask() -> None:
    model = WithTables(OTHERS["a windowed transformer's"])
    model.window[0] = -100.0
    amp = ampgraph.convert(model, (X, KEEP), policy="O2", dtype=torch.bfloat16)
    assert amp.plan.decisions["add"].reason.startswith("adds the mask 'unsqueeze'")


class TwoTables(Attention):
    """Tables whose rows all show something. Two of them hide whole rows, and one hides a whole column."""

    def __init__(self, masked: Callable[[nn.Module], Masked]) -> None:
        super().__init__(masked(self))
        for name, hidden in (("left", slice(3)), ("right", slice(3, None)), ("first", slice(1))):
            self.register_buffer(name, torch.zeros(LENGTH, LENGTH))
            self.get_buffer(name)[:, hidden] = -1e4


TABLES: dict[str, Callable[[nn.Module], Masked]] = {
    "two": lambda model: lambda scores, keep: scores + model.left + model.right,
    "of columns": lambda model: lambda scores, keep: (scores + model.first).transpose(1, 2),
}


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("masked", TABLES)
def test_tables_that_hide_what_a_softmax_reads(masked: str, dtype: torch.dtype) -> None:
    model = TwoTables(TABLES[masked])
    true, errors = model(X, KEEP), []
    for hazards in (True, False):
        policy = Policy("O2", dtype=dtype, loss_scale=NoLossScale(), hazards=hazards)
        found = ampgraph.convert(model, (X, KEEP), policy=policy)(X, KEEP)
        errors.append(float((found - true).norm() / true.norm()))
    assert errors[0] < 8 * EPS[dtype]
    assert errors[1] > 32 * EPS[dtype]


def test_a_product_spreads_a_mask_beyond_the_range() -> None:
    """Longformer builds its masks by a product with ones; in a low product its numbers would be -inf."""

    class Model(Attention):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            hidden = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
            mask = torch.einsum("bid,bjd->bij", torch.ones(*keep.shape, 1), hidden[..., None])
            scores = self.q(x) @ self.k(x).transpose(1, 2)
            return (scores + F.pad(mask, (0, 0, 0, 1))[:, :LENGTH]).softmax(-1) @ self.v(x)

    for dtype in EPS:
        model = Model(MASKED["a product"])
        policy = Policy("O2", dtype=dtype, loss_scale=NoLossScale())
        ampgraph.convert(model, (X, KEEP), policy=policy)(X, KEEP).square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


POOLED: dict[str, Masked] = {
    "amax": lambda x, keep: (x - (~keep).float()[..., None] * 1e3).amax(1),
    "max": lambda x, keep: (x - (~keep).float()[..., None] * 1e3).max(1)[0],
    "amin": lambda x, keep: (x + (~keep).float()[..., None] * 1e3).amin(1),
}


@pytest.mark.parametrize("pooled", POOLED)
def test_a_maximum_over_a_hidden_row_chooses_as_in_float32(pooled: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.head(POOLED[pooled](self.linear(x), keep))

    def gradient(level: str, hazards: bool = True) -> Tensor:
        policy = Policy(level, dtype=torch.float16, loss_scale=NoLossScale(), hazards=hazards)
        amp = ampgraph.convert(Model(), (X, KEEP), policy=policy)
        amp(X, KEEP).sum().backward()
        return amp.source.linear.weight.grad

    true = gradient("O0")
    assert (gradient("O2") - true).norm() < 0.01 * true.norm()
    assert (gradient("O2", hazards=False) - true).norm() > 0.1 * true.norm()
