"""Ranks of a job agree before a step, even if they hold different models and optimizers."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph
from ampgraph import DynamicLossScale, Policy
from ampgraph._compat import RankStore
from ampgraph.training import agreement

FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))
SYNCS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")


class Counts(TorchDispatchMode):
    """Counts the ops that run inside: collectives by their sizes, and those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = op.name().partition(".")[0]
        if name in SYNCS:
            self.syncs[name] += 1
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            self.collectives.append((name, sum(t.numel() for t in torch.utils._pytree.tree_leaves(args[0]))))
        return op(*args, **(kwargs or {}))


AGREEMENT = ("c10d::allreduce_", agreement.PLACES * agreement.COLUMNS)


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def values(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for o in optimizers for s in o.state.values() for v in s.values()]
    tensors = [t for t in (*model.parameters(), *state) if isinstance(t, torch.Tensor)]
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def is_same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


# -- who skips together ----------------------------------------------------------------------------------


def _stages(rank: int, fused: bool) -> list[tuple]:
    """Rank 1 has more parameters; each rank overflows once, then none."""
    amp = ampgraph.convert(linears(1 + 2 * rank), (torch.ones(2, 4),), policy=FLOAT16)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=0.1, fused=fused)
    amp.scaler.attach(optimizer)
    found = []
    for bad in (None, 0, 1, None):
        optimizer.zero_grad()
        (amp(torch.ones(2, 4)).sum() * (float("inf") if bad == rank else 1.0)).backward()
        before = values(amp, optimizer)
        optimizer.step()
        last = amp.scaler.last_overflow
        assert is_same(before, values(amp, optimizer)) == (bad is not None)
        found.append((amp.scaler.get_scale(), last and (last.step, last.parameters[0], last.rank)))
    state = amp.scaler.state_dict()
    other = ampgraph.convert(linears(1), policy=FLOAT16).scaler
    other.load_state_dict(state)
    assert other.last_overflow == amp.scaler.last_overflow
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_ranks_with_unlike_models_skip_together(ranks, fused) -> None:
    first, second = (2, "0.bias", 0), (3, "2.bias", 1)
    expected = [(1024.0, None), (512.0, first), (256.0, second), (256.0, second)]
    assert ranks.run(_stages, fused) == [expected, expected]


def _many_or_few_models(rank: int) -> list[float]:
    models = [ampgraph.convert(linears(1), (torch.ones(2, 4),), policy=FLOAT16) for _ in range((2, 20)[rank])]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    models[0].scaler.attach(optimizer)
    for bad in (None, 1, 18):
        optimizer.zero_grad()
        for i, model in enumerate(models):
            (model(torch.ones(2, 4)).sum() * (float("inf") if (i, rank) == (bad, 1) else 1.0)).backward()
        before = values(models[0])
        optimizer.step()
        assert is_same(before, values(models[0])) == (bad is not None)
    return [model.scaler.get_scale() for model in models]


def test_ranks_with_more_models_than_others(ranks) -> None:
    few, many = ranks.run(_many_or_few_models)
    assert few == [512.0, 512.0]  # what a rank without that model hears of counts for its first model
    assert many == [1024.0, 512.0, *[1024.0] * 13, *[512.0] * 5]


def _optimizers(rank: int, count: int, fused: bool) -> list[float]:
    amp = ampgraph.convert(linears(2), (torch.ones(2, 4),), policy=FLOAT16)
    parts = [amp.parameters()] if count == 1 else [part.parameters() for part in amp.source]
    optimizers = [torch.optim.SGD(part, lr=0.1, fused=fused) for part in parts]
    amp.scaler.attach(*optimizers)
    scales = []
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        is_bad = step == 1 and rank == 0
        (amp(torch.ones(2, 4)).sum() * (float("inf") if is_bad else 1.0)).backward()
        before = values(amp)
        with Counts() as counts:
            for optimizer in optimizers:
                optimizer.step()
        assert is_same(before, values(amp)) == (step == 1)
        assert counts.collectives == [AGREEMENT]
        scales.append(amp.scaler.get_scale())
    return scales


def _unlike_optimizers(rank: int, fused: bool) -> list[float]:
    return _optimizers(rank, 1 + rank, fused)


@pytest.mark.parametrize("fused", [False, True])
def test_ranks_with_unlike_numbers_of_optimizers_agree_once_a_round(ranks, fused) -> None:
    assert ranks.run(_unlike_optimizers, fused) == [[1024.0, 512.0, 512.0, 512.0]] * 2


def _backward_between_steps(rank: int) -> tuple[list[int], float]:
    """Each optimizer has its own loss, as in a GAN: the second step needs a second agreement."""
    amp = ampgraph.convert(linears(2), (torch.ones(2, 4),), policy=FLOAT16)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in amp.source]
    amp.scaler.attach(*optimizers)
    agreements = []
    for step in range(3):
        with Counts() as counts:
            for i, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                is_bad = (step, i, rank) == (1, 1, 0)
                (amp(torch.ones(2, 4)).sum() * (float("inf") if is_bad else 1.0)).backward()
                before = values(amp.source[i])
                optimizer.step()
                assert is_same(before, values(amp.source[i])) == ((step, i) == (1, 1))
        agreements.append(counts.collectives.count(AGREEMENT))
    return agreements, amp.scaler.get_scale()


def test_a_backward_between_the_steps_of_a_round(ranks) -> None:
    assert ranks.run(_backward_between_steps) == [([2, 2, 2], 512.0)] * 2


# -- what a step costs -----------------------------------------------------------------------------------


def _collectives_of_float32(how: str) -> list:
    model: nn.Module = linears(3)
    if how == "sharded":
        for module in (*model, model):
            fully_shard(module)
    else:
        model = DistributedDataParallel(model)
    for _ in range(3):  # the first calls build buckets
        with Counts() as counts:
            model(torch.ones(2, 4)).sum().backward()
    return counts.collectives


def _cost(rank: int, how: str, fused: bool, clips: bool) -> None:
    expected, model = _collectives_of_float32(how), linears(3)
    assert expected
    if how == "sharded":
        scaler = ampgraph.convert_blocks(model, "[0-9]", policy=FLOAT16).scaler
        for module in (*model, model):
            fully_shard(module)
        wrapped: nn.Module = model
    else:
        amp = ampgraph.convert(model, (torch.ones(2, 4),), policy=FLOAT16)
        wrapped, scaler = DistributedDataParallel(amp), amp.scaler
    optimizer = torch.optim.AdamW(wrapped.parameters(), fused=fused)
    scaler.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        with Counts() as outside:
            wrapped(torch.ones(2, 4)).sum().backward()
        if clips:
            nn.utils.clip_grad_value_(wrapped.parameters(), 1.0)
        with Counts() as inside:
            optimizer.step()
        assert AGREEMENT not in outside.collectives
        assert step < 2 or outside.collectives == expected
        assert inside.collectives == [AGREEMENT]
        if step:  # the first calls capture
            assert not outside.syncs
            # Without a fused optimizer one look at the result decides; foreach AdamW itself reads its counts.
            assert inside.syncs["aten::_local_scalar_dense"] == (0 if fused else 1 + len(optimizer.state))
            assert set(inside.syncs) <= {"aten::_local_scalar_dense"}


@pytest.mark.parametrize(
    ("how", "fused", "clips"),
    [
        ("replicated", True, False),
        ("replicated", False, False),
        ("sharded", True, False),
        ("sharded", True, True),
    ],
)
def test_a_step_adds_one_small_collective_and_no_wait(ranks, how, fused, clips) -> None:
    ranks.run(_cost, how, fused, clips)


# -- steps that are none ---------------------------------------------------------------------------------


def _build_state(amp: ampgraph.AmpModule) -> tuple[dict, dict]:
    optimizer = torch.optim.AdamW(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = amp.scaler.state_dict()
    get_optimizer_state_dict(amp, optimizer)
    assert optimizer.state
    built = amp.scaler.state_dict()
    for _ in range(2):
        optimizer.zero_grad()
        amp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    after = amp.scaler.state_dict()
    assert (after["_steps"], after["_growth_tracker"]) == (2, 2)
    return before, built


def test_a_step_that_builds_the_state_of_an_optimizer_is_none() -> None:
    before, built = _build_state(ampgraph.convert(linears(1), (torch.ones(2, 4),), policy=FLOAT16))
    assert before == built


def _build_state_together(rank: int) -> None:
    before, built = _build_state(ampgraph.convert(linears(1), (torch.ones(2, 4),), policy=FLOAT16))
    assert before == built


def test_ranks_that_build_the_state_of_an_optimizer(ranks) -> None:
    ranks.run(_build_state_together)


def test_gradients_from_elsewhere_count() -> None:
    amp = ampgraph.convert(linears(1), (torch.ones(2, 4),), policy=FLOAT16)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    for factor in (0.0, 1.0, float("inf"), float("nan")):
        for parameter in amp.parameters():
            parameter.grad = factor * torch.ones_like(parameter)
        before = values(amp)
        optimizer.step()
        assert is_same(before, values(amp)) == (factor != 1.0)
    state = amp.scaler.state_dict()
    assert (state["_steps"], state["scale"]) == (3, 256.0)


# -- what was wrong with shards --------------------------------------------------------------------------


class Detached(nn.Module):
    """The last of three layers learns alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[1](self.layers[0](x))
        return x, self.layers[2](x.detach())


def _last_block(rank: int) -> list[float]:
    model = Detached()
    scaler = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16).scaler
    for module in (*model.layers, model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.attach(optimizer)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        first, last = model(torch.ones(2, 4))
        (first.sum() + last.sum() * (float("inf") if step == 0 and rank == 1 else 1.0)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        before = values(model)
        optimizer.step()
        assert is_same(before, values(model)) == (step == 0)
        scales.append(scaler.get_scale())
    assert scaler.last_overflow.parameters[0] == "layers.2.bias"
    assert scaler.last_overflow.rank == 1
    return scales


def test_an_overflow_of_the_last_sharded_block_that_is_made_finite(ranks) -> None:
    assert ranks.run(_last_block) == [[512.0] * 4] * 2


# -- ranks that are waited for ---------------------------------------------------------------------------


def test_a_rank_that_never_steps_is_named(monkeypatch) -> None:
    store = RankStore(dist.HashStore())
    monkeypatch.setattr(agreement, "store_of_ranks", lambda: store)
    monkeypatch.setattr(agreement, "SECONDS", 0.1)
    agreement._publish(1, 0, ["weight"])
    with pytest.warns(UserWarning, match=r"waits for the ranks 0, 2\..*process_groups"):
        agreement._wait_for((0, 1, 2))
    agreement._publish(0, 0, ["weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement._wait_for((0, 1))
