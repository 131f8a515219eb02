"""The oracle against first principles, and against torch's CPU autocast really run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zoo.casts import OracleResult
from tests.zoo.oracle import autocast_oracle

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Fn(nn.Module):
    """A module around a function of tensors."""

    def __init__(self, function: Any, **parameters: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in parameters.items():
            self.add_module(name, module)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def oracle(module: nn.Module, *args: Tensor, dtype: torch.dtype | None = F16) -> OracleResult:
    gm = torch.export.export(module, args, strict=False).module()
    return autocast_oracle(gm, args, {}, dtype)


def casts(result: OracleResult) -> list[tuple[str, torch.dtype, torch.dtype]]:
    return [(cast.node, cast.src, cast.dst) for cast in result.activation_casts]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_conv_relu_conv(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    result = oracle(model, torch.randn(1, 3, 8, 8), dtype=dtype)
    assert casts(result) == [("conv2d", F32, dtype)]
    assert sum(cast.is_parameter for cast in result.casts) == 4
    assert result.node_dtypes["relu"] == result.node_dtypes["conv2d_1"] == dtype
    assert result.activation_cast_bytes == 3 * 8 * 8 * (4 + 2)
    assert result.activation_cast_bytes_written == 3 * 8 * 8 * 2


def test_one_input_of_three_linears_is_cast_three_times() -> None:
    model = Fn(lambda m, x: (m.q(x), m.k(x), m.v(x)), q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4))
    result = oracle(model, torch.randn(2, 4))
    assert casts(result) == [("linear", F32, F16), ("linear_1", F32, F16), ("linear_2", F32, F16)]
    assert len(result.casts) == 9


def test_a_parameter_is_cast_once() -> None:
    model = Fn(lambda m, x: m.tied(m.tied(x)) @ m.tied.weight.t(), tied=nn.Linear(4, 4, bias=False))
    result = oracle(model, torch.randn(2, 4))
    parameters = [cast for cast in result.casts if cast.is_parameter]
    assert [(cast.node, cast.numel) for cast in parameters] == [("linear", 16), ("matmul", 16)]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_softmax_widens_in_its_kernel(dtype: torch.dtype) -> None:
    model = Fn(lambda m, x: m.conv(x).softmax(1), conv=nn.Conv2d(3, 4, 3))
    result = oracle(model, torch.randn(1, 3, 8, 8), dtype=dtype)
    assert casts(result) == [("conv2d", F32, dtype)]
    assert result.node_dtypes["softmax"] == F32


def test_promoting_ops() -> None:
    model = Fn(lambda m, x: (m.fc(x) + x, torch.cat([m.fc(x), x])), fc=nn.Linear(4, 4))
    result = oracle(model, torch.randn(2, 4))
    assert result.node_dtypes["add"] == result.node_dtypes["cat"] == F32
    assert casts(result) == [("linear", F32, F16), ("linear_1", F32, F16)]


def test_layer_norm_widens_before_its_kernel() -> None:
    model = Fn(lambda m, x: F.layer_norm(m.fc(x), (4,)), fc=nn.Linear(4, 4))
    assert casts(oracle(model, torch.randn(2, 4))) == [("linear", F32, F16), ("layer_norm", F16, F32)]


def test_attention_does_not_widen_inside() -> None:
    model = Fn(lambda m, x: F.scaled_dot_product_attention(x, m.fc(x), x), fc=nn.Linear(4, 4))
    result = oracle(model, torch.randn(1, 2, 4))
    attention = "scaled_dot_product_attention"
    assert casts(result) == [("linear", F32, F16), (attention, F32, F16), (attention, F32, F16)]
    assert result.node_dtypes[attention] == F16


def test_casts_inside_a_composite_op_are_found() -> None:
    model = Fn(lambda m, x: torch.einsum("ij,jk->ik", x, m.fc(x).t()), fc=nn.Linear(4, 4))
    assert ("einsum", F32, F16) in casts(oracle(model, torch.randn(2, 4)))


def test_casts_of_the_graph_are_not_autocasts() -> None:
    model = Fn(lambda m, x: m.fc(x.to(BF16).float()), fc=nn.Linear(4, 4))
    result = oracle(model, torch.randn(2, 4))
    assert casts(result) == [("linear", F32, F16)]
    assert [(cast.src, cast.dst) for cast in result.own_casts] == [(F32, BF16), (BF16, F32)]


def test_without_autocast_it_is_a_census() -> None:
    model = Fn(lambda m, x: m.fc(x.to(BF16).float()), fc=nn.Linear(4, 4))
    result = oracle(model, torch.randn(2, 4), dtype=None)
    assert not result.casts
    assert len(result.own_casts) == 2


def test_a_region_without_autocast() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            exact = m.fc(x)
        return m.fc(exact)

    result = oracle(Fn(forward, fc=nn.Linear(4, 4)), torch.randn(2, 4))
    assert casts(result) == [("linear_1", F32, F16)]
    assert result.node_dtypes["linear_1"] == F16
    assert [dtype for name, dtype in result.node_dtypes.items() if name.endswith(".linear")] == [F32]


def test_recurrent_networks_are_one_kernel() -> None:
    model = nn.GRU(4, 4)
    result = oracle(model, torch.randn(3, 2, 4))
    assert [cast.numel for cast in result.activation_casts] == [3 * 2 * 4, 2 * 4]
    assert sum(cast.is_parameter for cast in result.casts) == 4
    assert result.node_dtypes["gru"] == (F16, F16)


def test_devices_in_place_ops_and_factories() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        places = torch.arange(4.0, device="cpu").to("cpu")
        y = m.conv(x[:, :, [0, 2, 1, 3]])
        y += places[:2]
        y[:, 0] = 1
        return y.relu_()

    result = oracle(Fn(forward, conv=nn.Conv1d(3, 5, 3)), torch.randn(2, 3, 4))
    assert casts(result) == [("conv1d", F32, F16)]
    assert result.node_dtypes["relu_"] == F16


def test_batch_norm_in_training() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert casts(oracle(model, torch.randn(2, 3, 8, 8))) == [("conv2d", F32, F16)]


class Casts(TorchDispatchMode):
    """Lists the float-to-float casts that are really made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((args[0].dtype, out.dtype, out.numel()))
        return out


def test_agrees_with_cpu_autocast_really_run() -> None:
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.mlp(x)
        return F.mse_loss(y @ y.t(), x @ x.t())

    model, x = Fn(forward, mlp=nn.Sequential(*layers)), torch.randn(5, 6)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16, cache_enabled=False), Casts() as really:
        model(x)
    result = oracle(model, x, dtype=BF16)
    assert Counter(really.seen) == Counter((cast.src, cast.dst, cast.numel) for cast in result.casts)
