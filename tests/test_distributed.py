"""DDP and FSDP2 around converted models: two processes, gloo, CPU."""

from __future__ import annotations

import copy
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampgraph
from ampgraph import DynamicLossScale, Policy

from .models import ResidualBlock
from .ranks import gathered

FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))
# A weight's gradient is one float16 product over the batch here, and the mean of two rounded ones there; each
# is within half a unit in the last place, and so is each activation that it is made of.
TOLERANCE = 2 * torch.finfo(torch.float16).eps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(4, 8), nn.ModuleList([ResidualBlock(), ResidualBlock()])
        self.head, self.side = nn.Linear(8, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.embed(x)
        for layer in self.layers:
            z = layer(z)
        return self.head(z), self.side(y)


def batch(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)
    return x[rows].clone(), y[rows].clone()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = model(x, y)
    return first.square().mean() + second.square().mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def here(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    return [here(t) for t in (*model.parameters(), *state)]


def train(
    rank: int,
    wrapped: nn.Module,
    scaler: Any,
    reference: nn.Module,
    tolerance: float = TOLERANCE,
    bad_block: str = "side",
    **options: Any,
) -> None:
    """Four steps, the third with an infinite input of one module on rank 1 alone."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, **options)
    scaler.attach(optimizer)
    one = ampgraph.convert(reference, batch(slice(None)), policy=FLOAT16)
    loss_of(one, *batch(slice(None))).backward()
    for step in range(4):
        x, y = batch(slice(4 * rank, 4 * rank + 4))
        if step == 2 and rank == 1:
            y[0, 0] = float("inf")
        optimizer.zero_grad()
        loss_of(wrapped, x, y).backward()
        if step == 0:
            for mine, theirs in zip(wrapped.parameters(), reference.parameters(), strict=True):
                assert mine.grad.dtype == torch.float32
                error = (whole(mine.grad) - theirs.grad).norm() / theirs.grad.norm()
                assert error <= tolerance, error
        before = everything(wrapped, optimizer)
        optimizer.step()
        after = everything(wrapped, optimizer)
        if step == 2:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            overflow = scaler.last_overflow
            assert overflow.step == 3
            assert {name.removeprefix("module.") for name in overflow.parameters} <= {
                f"{bad_block}.bias",
                f"{bad_block}.weight",
            }
        else:
            assert not torch.equal(before[0], after[0])
        for parameter in wrapped.parameters():
            mine, theirs = gathered(whole(parameter))
            assert torch.equal(mine, theirs)
    assert scaler.get_scale() == 512.0


# -- DistributedDataParallel -----------------------------------------------------------------------------


def _data_parallel(rank: int, how: str, options: dict) -> None:
    torch.manual_seed(rank)  # the wrapper gives all ranks rank 0's parameters
    model, example = Net(), batch(slice(4 * rank, 4 * rank + 4))
    if how == "ahead of time":
        inner = amp = ampgraph.convert(model, example, policy=FLOAT16)
    elif how == "just in time":
        inner = amp = ampgraph.convert(model, policy=FLOAT16)
    else:
        inner, amp = model, ampgraph.convert_blocks(model, ("layers.*", "side"), policy=FLOAT16)
    wrapped = DistributedDataParallel(inner)
    train(rank, wrapped, amp.scaler, copy_of(model), **options)


def _in_buckets(rank: int, backend: str, cap: float, graphs: int) -> None:
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    amp = ampgraph.convert(model, dtype=torch.bfloat16, backend=backend)
    wrapped = DistributedDataParallel(amp, bucket_cap_mb=cap)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "Guards may run slower on Python 3.13.0"
        )  # from Dynamo, on torch 2.14
        wrapped(torch.ones(2, 600)).sum().backward()
    assert len(amp.graph_modules) == graphs
    assert amp.coverage.left_out == ()


@pytest.mark.parametrize(("backend", "cap", "graphs"), [("eager", 0.5, 1), ("aot_eager", 2, 3)])
def test_data_parallel_in_buckets(ranks, backend: str, cap: float, graphs: int) -> None:
    """Dynamo splits a graph by the buckets of the wrapper where a compiled backward runs."""
    ranks.run(_in_buckets, backend, cap, graphs)


def copy_of(model: nn.Module) -> nn.Module:
    copied = Net()
    copied.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
    return copied


@pytest.mark.parametrize("how", ["ahead of time", "just in time", "blocks"])
@pytest.mark.parametrize("fused", [False, True])
def test_data_parallel(ranks, how, fused) -> None:
    ranks.run(_data_parallel, how, {"fused": fused})


def _low_precision_traffic(rank: int) -> None:
    model = Net()
    amp = ampgraph.convert(model, batch(slice(0, 4)), policy=FLOAT16)
    wrapped = DistributedDataParallel(amp)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    train(rank, wrapped, amp.scaler, copy_of(model), tolerance=2 * TOLERANCE)


def test_data_parallel_with_compressed_gradients(ranks) -> None:
    ranks.run(_low_precision_traffic)


def _accumulate(rank: int) -> None:
    amp = ampgraph.convert(Net(), batch(slice(0, 4)), policy=FLOAT16)
    wrapped = DistributedDataParallel(amp)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    x, y = batch(slice(0, 4))
    with wrapped.no_sync():
        loss_of(wrapped, x, y * (float("inf") if rank == 1 else 1.0)).backward()
    loss_of(wrapped, x, y).backward()
    before = everything(wrapped, optimizer)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(wrapped, optimizer), strict=True))
    assert amp.scaler.last_overflow.parameters[0].startswith("side.")


def test_data_parallel_keeps_the_overflow_of_an_early_micro_batch(ranks) -> None:
    ranks.run(_accumulate)


def _wrong_order(rank: int, just_in_time: bool) -> None:
    model = DistributedDataParallel(Net())
    args = None if just_in_time else batch(slice(0, 4))
    with pytest.raises(ampgraph.CaptureError, match=r"DistributedDataParallel\(ampgraph.convert\(model"):
        ampgraph.convert(model, args, policy=FLOAT16)
    blocks = ampgraph.convert_blocks(model, "module", policy=FLOAT16)
    train(rank, model, blocks.scaler, copy_of(model.module))


@pytest.mark.parametrize("just_in_time", [False, True])
def test_converting_a_wrapper_says_what_to_do(ranks, just_in_time) -> None:
    ranks.run(_wrong_order, just_in_time)


# -- gradients that are changed before the step ----------------------------------------------------------


def clip_by_value(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(parameters, 1.0)


def signs(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad.sign_()


def new_numbers(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = p.grad.nan_to_num(0.0, 1.0, -1.0)


def _made_finite(rank: int, how: str, change: Any, batches: int) -> list[float]:
    model, example = Net(), batch(slice(4 * rank, 4 * rank + 4))
    if how == "sharded":
        scaler = ampgraph.convert_blocks(model, ("layers.*", "side"), policy=FLOAT16).scaler
        wrapped: nn.Module = fully_shard(model)
    elif how == "blocks":
        scaler = ampgraph.convert_blocks(model, ("layers.*", "side"), policy=FLOAT16).scaler
        wrapped = DistributedDataParallel(model)
    else:
        amp = ampgraph.convert(model, example if how != "just in time" else None, policy=FLOAT16)
        wrapped, scaler = DistributedDataParallel(amp, gradient_as_bucket_view=how == "views"), amp.scaler
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler.attach(optimizer)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        for i in range(batches):
            x, y = example
            is_bad = step % 2 and rank == 1 and i == 0
            loss_of(wrapped, x, y).mul(float("inf") if is_bad else 1.0).backward()
        change(list(wrapped.parameters()))
        before = everything(wrapped, optimizer)
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, everything(wrapped, optimizer), strict=True)]
        assert all(same) if step % 2 else not all(same)
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("how", ["ahead of time", "just in time", "blocks", "views", "sharded"])
@pytest.mark.parametrize("change", [clip_by_value, signs, new_numbers])
def test_an_overflow_of_one_rank_that_is_made_finite(ranks, how, change) -> None:
    assert ranks.run(_made_finite, how, change, 1) == [[1024.0, 512.0, 512.0, 256.0]] * 2


@pytest.mark.parametrize("how", ["ahead of time", "sharded"])
def test_an_overflow_of_an_early_micro_batch_that_is_made_finite(ranks, how) -> None:
    assert ranks.run(_made_finite, how, clip_by_value, 3) == [[1024.0, 512.0, 512.0, 256.0]] * 2


def _micro_batches(rank: int, how: str, waits: bool) -> tuple:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ampgraph")
        return _trained_on_micro_batches(rank, how, waits)


def _trained_on_micro_batches(rank: int, how: str, waits: bool) -> tuple:
    model, (x, y) = Net(), batch(slice(4 * rank, 4 * rank + 4))
    backend = "aot_eager" if how == "sharded and compiled" else "eager"
    scaler = ampgraph.convert_blocks(model, ("layers.*", "side"), policy=FLOAT16, backend=backend).scaler
    is_sharded = how.startswith("sharded")
    if is_sharded:
        for layer in model.layers:
            fully_shard(layer)
        wrapped: Any = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=how == "views")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler.attach(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        for i in range(3):
            is_synchronized = i == 2 or not waits
            if is_sharded:
                wrapped.set_requires_gradient_sync(is_synchronized)
            with nullcontext() if is_sharded or is_synchronized else wrapped.no_sync():
                first, second = wrapped(x, y)
                loss = first.square().mean() + second.square().mean()
                if (step, rank, i) == (1, 1, 0):
                    loss = loss + second[0, 0] * float("inf")  # one row; it is in the shards of rank 0
                loss.backward()
        clip_by_value(list(wrapped.parameters()))
        before = everything(wrapped, optimizer)
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, everything(wrapped, optimizer), strict=True)]
        assert all(same) if step == 1 else not all(same)
    overflow = scaler.last_overflow
    return scaler.get_scale(), overflow and (overflow.step, overflow.rank, overflow.parameters[0])


@pytest.mark.parametrize(
    ("how", "waits"),
    [
        ("replicas", True),
        ("replicas", False),
        ("views", True),
        ("sharded", True),
        ("sharded", False),
        ("sharded and compiled", True),
        ("sharded and compiled", False),
    ],
)
def test_the_rank_whose_early_micro_batch_overflowed_is_named(ranks, how, waits) -> None:
    assert ranks.run(_micro_batches, how, waits) == [(512.0, (2, 1, "side.bias"))] * 2


def _left_out(rank: int, how: str, in_place: bool) -> float:
    model, example = Net(), batch(slice(0, 4))
    if how == "sharded":
        scaler = ampgraph.convert_blocks(model, ("layers.*", "side"), policy=FLOAT16).scaler
        wrapped: nn.Module = fully_shard(model)
    else:
        amp = ampgraph.convert(model, example, policy=FLOAT16)
        wrapped, scaler = DistributedDataParallel(amp), amp.scaler
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler.attach(optimizer)
    for step in range(6):
        optimizer.zero_grad(set_to_none=not in_place)
        loss_of(wrapped, *example).mul(float("inf") if step % 2 else 1.0).backward()
        if whole(nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)).isfinite():
            optimizer.step()
    optimizer.zero_grad()
    wrapped(*example)
    return scaler.get_scale()


@pytest.mark.parametrize("how", ["ahead of time", "sharded"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_that_all_ranks_leave_out(ranks, how, in_place) -> None:
    assert ranks.run(_left_out, how, in_place) == [128.0, 128.0]


# -- who waits for whom ----------------------------------------------------------------------------------


def _one_steps_alone(rank: int, how: str) -> float | None:
    group = dist.new_group([0])
    if rank == 1:
        return None  # a collective over all ranks would never end
    amp = ampgraph.convert(Net(), batch(slice(0, 4)), policy=FLOAT16)
    model = DistributedDataParallel(amp, process_group=group) if how == "wrapper" else amp
    amp.scaler.process_groups = (group,) if how == "wrapper" else ()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    x, y = batch(slice(0, 4))
    loss_of(model, x, y / 0).backward()
    optimizer.step()
    return amp.scaler.get_scale()


@pytest.mark.parametrize("how", ["wrapper", "said"])
def test_a_rank_that_does_not_step_is_not_waited_for(ranks, how) -> None:
    assert ranks.run(_one_steps_alone, how) == [512.0, None]


def _averaged_by_hand(rank: int) -> float:
    amp = ampgraph.convert(Net(), batch(slice(0, 4)), policy=FLOAT16)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    x, y = batch(slice(0, 4))
    loss_of(amp, x, y / 0 if rank == 1 else y).backward()
    before = everything(amp, optimizer)
    for parameter in amp.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(amp, optimizer), strict=True))
    return amp.scaler.get_scale()


def test_without_a_wrapper_all_ranks_agree(ranks) -> None:
    assert ranks.run(_averaged_by_hand) == [512.0, 512.0]


def _update_after_each_step(rank: int) -> list[bool]:
    """The critic overflows once, and its gradient stays infinite while the actor steps."""
    torch.manual_seed(0)
    actor, critic = (ampgraph.convert(nn.Linear(4, 4), (torch.ones(2, 4),), policy=FLOAT16) for _ in range(2))
    models, scaler = (DistributedDataParallel(actor), DistributedDataParallel(critic)), actor.scaler
    optimizers = [torch.optim.Adam(m.parameters()) for m in models]
    moved = []
    for step in range(4):
        optimizers[1].zero_grad()
        loss = models[1](torch.randn(2, 4)).sum() * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[0].zero_grad()
        scaler.scale(models[1](models[0](torch.randn(2, 4))).mean()).backward()
        before = here(actor.weight)
        scaler.step(optimizers[0])
        scaler.update()
        moved.append(not torch.equal(before, actor.weight))
    assert [m.scaler.get_scale() for m in (actor, critic)] == [1024.0, 512.0]
    return moved


def test_optimizers_with_an_update_of_their_own_skip_alone(ranks) -> None:
    assert ranks.run(_update_after_each_step) == [[True] * 4] * 2


def linear() -> ampgraph.AmpModule:
    return ampgraph.convert(nn.Linear(4, 4), (torch.ones(2, 4),), policy=FLOAT16)


def _many_models(rank: int) -> list[float]:
    kept, models = [], []
    for i in range(8):  # objects lie elsewhere in the memory of each rank
        kept.append([bytearray(100 * (i + 1)) for _ in range(500 * rank)])
        models.append(linear())
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    models[0].scaler.attach(optimizer)
    for i, model in enumerate(models):
        (model(torch.ones(2, 4)).sum() * (float("inf") if i == 5 and rank == 1 else 1.0)).backward()
    optimizer.step()
    return [m.scaler.get_scale() for m in models]


def test_ranks_agree_on_the_scales_of_many_models(ranks) -> None:
    expected = [512.0 if i == 5 else 1024.0 for i in range(8)]
    assert ranks.run(_many_models) == [expected, expected]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.b = ampgraph.convert(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.ones(2, 4),), policy=FLOAT16
        )

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def _unused_expert(rank: int, own_group: bool) -> list[float]:
    experts = Experts()
    group = dist.new_group([0, 1]) if own_group else None
    wrapped = DistributedDataParallel(experts, find_unused_parameters=True, process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    experts.a.scaler.attach(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = wrapped(torch.ones(2, 4), rank == 0 or step > 0).sum()
        (loss * (float("inf") if rank == 0 and step == 0 else 1.0)).backward()
        optimizer.step()
    return [m.scaler.get_scale() for m in (experts.a, experts.b)]


@pytest.mark.parametrize("own_group", [False, True])
def test_a_rank_that_leaves_an_expert_out_asks_for_it_too(ranks, own_group) -> None:
    assert ranks.run(_unused_expert, own_group) == [[512.0, 512.0]] * 2


# -- FSDP2 -----------------------------------------------------------------------------------------------


def _sharded(rank: int, order: str, low_traffic: bool, options: dict) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    traffic = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if low_traffic else None)
    if order == "convert first":
        blocks = ampgraph.convert_blocks(model, ("layers.*", "side"), policy=FLOAT16)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=traffic)
    if order == "shard first":
        blocks = ampgraph.convert_blocks(model, ("layers.*", "side"), policy=FLOAT16)
    assert [type(m).__name__ for m in model.layers] == ["FSDPResidualBlock", "FSDPResidualBlock"]
    tolerance = TOLERANCE + low_traffic * torch.finfo(torch.bfloat16).eps
    train(rank, model, blocks.scaler, reference, tolerance, **options)
    low = {d.dtype for block in blocks.values() for d in block.plan.decisions.values()}
    assert torch.float16 in low


@pytest.mark.parametrize(
    ("order", "low_traffic", "fused"),
    [
        ("convert first", False, False),
        ("convert first", False, True),
        ("shard first", False, False),
        ("convert first", True, False),
    ],
)
def test_fully_sharded(ranks, order, low_traffic, fused) -> None:
    ranks.run(_sharded, order, low_traffic, {"fused": fused})


def _whole_model_sharded_at_its_root(rank: int) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    amp = ampgraph.convert(model, batch(slice(0, 4)), policy=FLOAT16)
    train(rank, fully_shard(amp), amp.scaler, reference)


def test_converted_model_fully_sharded_at_its_root(ranks) -> None:
    ranks.run(_whole_model_sharded_at_its_root)


def _parts_of_one_graph_sharded(rank: int, order: str) -> None:
    model, example = Net(), batch(slice(0, 4))
    amp = ampgraph.convert(model, example, policy=FLOAT16)
    for module in (*model.layers, model):
        fully_shard(module)
    with pytest.raises(ampgraph.CaptureError, match=r"fully_shard.*convert_blocks"):
        amp(*example) if order == "convert first" else ampgraph.convert(model, example)


@pytest.mark.parametrize("order", ["convert first", "shard first"])
def test_one_graph_over_sharded_parts_says_what_to_do(ranks, order) -> None:
    ranks.run(_parts_of_one_graph_sharded, order)


def _nothing_whole_is_kept(rank: int) -> bool:
    model = Net()
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16)
    parameter = weakref.ref(model.layers[0].up.weight)
    fully_shard(model)
    blocks.scaler.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    return parameter() is None


def test_the_scaler_keeps_no_unsharded_parameter(ranks) -> None:
    assert ranks.run(_nothing_whole_is_kept) == [True, True]
