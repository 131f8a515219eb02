"""DTensors of tensor, sequence and loss parallelism, and parameters that shards deliver in a low dtype."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import ampgraph
from ampgraph import Policy

FLOAT16 = Policy(dtype=torch.float16)
X = torch.randn(2, 4, 8)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


PLANS = {
    "tensor": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    },
    "loss": {"down": ColwiseParallel(use_local_output=False)},
}


def parallel(kind: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), Feed())
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    parallelize_module(model[1], mesh["model"], PLANS[kind.removeprefix("sharded ")])
    if kind.startswith("sharded"):
        fully_shard(model[1], mesh=mesh["data"])
    return model


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize(
    ("kind", "which"),
    [
        *((kind, which) for kind in (*PLANS, "sharded tensor") for which in ("", "1", "1.down")),
        ("sequence", "1.norm"),
    ],
)
def test_no_model_with_dtensors_runs_in_silence(kind, which, capture) -> None:
    model = parallel(kind)
    expected = model(X)
    blocks = ampgraph.convert_blocks(model, which, policy=FLOAT16, capture=capture)
    with pytest.raises(ampgraph.CaptureError, match="DTensor"):
        model(X)
    blocks.restore()
    assert torch.equal(plain(model(X)), plain(expected))


@pytest.mark.parametrize("args", [None, (X,)])
@pytest.mark.parametrize("kind", PLANS)
def test_convert_refuses_at_once(kind, args) -> None:
    with pytest.raises(ampgraph.CaptureError, match=r"'1\..*' is a DTensor with the placements"):
        ampgraph.convert(parallel(kind), args, policy=FLOAT16)


def test_parallelized_after_the_conversion() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Feed())
    ampgraph.convert_blocks(model, "1", policy=FLOAT16)
    model(X)
    parallelize_module(model[1], init_device_mesh("cpu", (1,)), PLANS["tensor"])
    with pytest.raises(ampgraph.CaptureError, match="DTensor"):
        model(X)


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_arguments_that_are_dtensors(capture) -> None:
    x = distribute_tensor(X, init_device_mesh("cpu", (1,)), [Replicate()])
    amp = ampgraph.convert(nn.ReLU(), capture=capture, policy=FLOAT16)
    with pytest.raises(ampgraph.CaptureError, match="DTensor"):
        amp(x)


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_a_graph_of_plain_tensors_takes_no_dtensors(capture) -> None:
    x = distribute_tensor(X, init_device_mesh("cpu", (1,)), [Replicate()])
    model = nn.Sequential(nn.ReLU(), nn.GELU())
    ampgraph.convert_blocks(model, "1", policy=FLOAT16, capture=capture)
    assert torch.equal(model(X), nn.functional.gelu(X.relu()))
    with pytest.raises(ampgraph.CaptureError, match="DTensor"):
        model(x)


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_all_parameters_and_arguments_become_dtensors(capture) -> None:
    model, mesh = Feed(), init_device_mesh("cpu", (1,))
    amp = ampgraph.convert(model, (X,) if capture == "ahead of time" else None, policy=FLOAT16)
    amp(X)
    distribute_module(model, mesh)
    with pytest.raises(ampgraph.CaptureError, match="DTensor"):
        amp(distribute_tensor(X, mesh, [Replicate()]))


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("args", [None, (X,)])
def test_a_converted_model_is_parallelized(kind, args) -> None:
    amp = ampgraph.convert(nn.Sequential(nn.Linear(8, 8), Feed()), args, policy=FLOAT16)
    amp(X)
    parallelize_module(amp.source[1], init_device_mesh("cpu", (1,)), PLANS[kind])
    with pytest.raises(ampgraph.CaptureError, match="DTensor"):
        amp(X)


def test_blocks_that_are_sharded_and_parallelized_later() -> None:
    """The message names both, because shards of plain parameters are right here."""
    model = nn.Sequential(nn.Linear(8, 8), Feed())
    ampgraph.convert_blocks(model, "1", policy=FLOAT16)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    parallelize_module(model[1], mesh["model"], PLANS["tensor"])
    fully_shard(model[1], mesh=mesh["data"])
    with pytest.raises(ampgraph.CaptureError, match="parallelize_module has split"):
        model(X)


@pytest.mark.parametrize("which", ["net.0", "", "net"])
def test_loss_parallel(which) -> None:
    """Blocks without DTensors run; a block whose forward meets one is refused."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = parallel("loss")

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(x).flatten(0, 1), y)

    model, y = Loss(), torch.randint(0, 8, (8,))
    blocks = ampgraph.convert_blocks(model, which, policy=FLOAT16)
    with loss_parallel():
        if which == "net.0":
            model(X, y).backward()
            assert blocks[which].plan.casts
            return
        with pytest.raises(ampgraph.CaptureError, match="DTensor"):
            model(X, y)


def test_export_and_the_backend() -> None:
    with pytest.raises(ampgraph.CaptureError, match="DTensor"):
        ampgraph.export(parallel("tensor"), (X,), policy=FLOAT16)
    compiled = torch.compile(parallel("tensor"), backend="ampgraph")
    with pytest.raises(Exception, match=r"DTensor.*parallelize_module"):
        compiled(X)


def test_blocks_without_dtensors_next_to_others() -> None:
    model = parallel("tensor")
    blocks = ampgraph.convert_blocks(model, "0", policy=FLOAT16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks.scaler.attach(optimizer)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        (model(X).square().mean() * factor).backward()
        before = [plain(p) for p in model.parameters()]
        optimizer.step()
        same = [torch.equal(a, plain(p)) for a, p in zip(before, model.parameters(), strict=True)]
        assert all(same) if factor > 1 else not any(same)
    assert torch.float16 in {d.dtype for d in blocks["0"].plan.decisions.values()}


# -- parameters that arrive low --------------------------------------------------------------------------


def low_on_arrival(
    param_dtype: torch.dtype | None, casts_inputs: bool = True
) -> tuple[nn.Module, Mapping[str, ampgraph.AmpModule]]:
    model = nn.Sequential(Feed(), nn.Linear(8, 8))
    blocks = ampgraph.convert_blocks(model, "0", policy=FLOAT16)
    traffic = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=casts_inputs
    )
    fully_shard(model[0], mp_policy=traffic)
    fully_shard(model)
    return model, blocks


def test_float16_parameters_of_shards_are_told_of() -> None:
    model, blocks = low_on_arrival(torch.float16, casts_inputs=False)
    with pytest.warns(UserWarning, match=r"6 parameters and inputs of 0.*arrive in float16.*param_dtype"):
        model(X)
    assert "low on arrival: 6 parameters (float16)" in str(ampgraph.explain(blocks["0"]))


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_training_on_float16_parameters_of_shards(capture) -> None:
    """The warning comes once, at the first call with gradients, and points here; an overflow is skipped."""
    model = nn.Sequential(Feed())
    blocks = ampgraph.convert_blocks(model, "0", policy=FLOAT16, capture=capture)
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=0.1)
    blocks.scaler.attach(optimizer)
    told = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = model(X).float().square().mean()
        told.append([w for w in caught if "arrive in float16" in str(w.message)])
        (loss * factor).backward()
        before = [plain(p) for p in model.parameters()]
        optimizer.step()
        assert all(map(torch.equal, before, map(plain, model.parameters()))) == (factor > 1)
    assert [len(of_call) for of_call in told] == [1, 0, 0]
    assert told[0][0].filename == __file__
    assert "omit param_dtype" in str(told[0][0].message)
    assert blocks.scaler.get_scale() == 2.0**15
    assert "low on arrival: 6 parameters (float16), inputs" in str(ampgraph.explain(blocks["0"]))


def test_parameters_that_arrive_whole_keep_small_gradients() -> None:
    model, blocks = low_on_arrival(None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ampgraph")
        (model[0](X).sum() * 1e-9).backward()
    assert "low on arrival" not in str(ampgraph.explain(blocks["0"]))
    gradient = plain(model[0].down.bias.grad)
    assert torch.allclose(gradient, torch.full_like(gradient, 8e-9), rtol=1e-3, atol=0.0)


def sharded_in_bfloat16(model: nn.Module) -> nn.Module:
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return fully_shard(model)


def test_bfloat16_parameters_of_shards() -> None:
    model = nn.Sequential(Feed())
    exact, peer = copy.deepcopy(model), sharded_in_bfloat16(copy.deepcopy(model))
    blocks = ampgraph.convert_blocks(model, "0", dtype=torch.bfloat16)
    sharded_in_bfloat16(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ampgraph")
        model(X).float().square().mean().backward()
    exact(X).square().mean().backward()
    peer(X).float().square().mean().backward()
    for mine, theirs, true in zip(model.parameters(), peer.parameters(), exact.parameters(), strict=True):
        error, usual = ((plain(p.grad) - true.grad).norm() / true.grad.norm() for p in (mine, theirs))
        assert mine.grad.dtype == torch.float32
        assert error <= 1.5 * usual, (error, usual)  # all roundings are those of bfloat16 parameters
    text = str(ampgraph.explain(blocks["0"]))
    assert "low on arrival: 6 parameters (bfloat16), inputs x (bfloat16)" in text
