"""Advice names the op, the module and the size, for low ops alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampgraph
from ampgraph import Policy
from ampgraph.report.advice import Advice

from .helpers import Fn


def advice(model: nn.Module, *args: torch.Tensor, **options: object) -> list[Advice]:
    amp = ampgraph.convert(model, args, dtype="float16", **options)  # type: ignore[call-overload]
    return list(ampgraph.explain(amp).advice)


def found(model: nn.Module, *args: torch.Tensor) -> list[tuple]:
    return [(a.rule, a.what, a.size, a.better) for a in advice(model, *args)]


def test_good_sizes_need_no_advice() -> None:
    assert found(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), torch.randn(8, 16)) == []


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Linear(12, 8), (8, 12), [("gemm", "inner size (K)", 12, 16)]),
        (nn.Linear(16, 10), (8, 16), [("gemm", "columns (N)", 10, 16)]),
        (nn.Linear(16, 8), (3, 7, 16), [("gemm", "rows (M)", 21, 24)]),
        (nn.Linear(16, 8), (1, 16), []),
        (nn.Linear(16, 5001), (8, 16), [("vocabulary", "columns (N)", 5001, 5008)]),
        (nn.Conv2d(12, 30, 3), (1, 12, 8, 8), [("convolution", "input channels", 12, 16),
                                               ("convolution", "output channels", 30, 32)]),
        (nn.Conv2d(3, 16, 3), (1, 3, 8, 8), []),
        (nn.Conv2d(12, 12, 3, groups=12), (1, 12, 8, 8), []),
        (nn.Conv2d(24, 48, 3, groups=2), (1, 24, 8, 8), [("convolution", "input channels", 12, 16)]),
        (nn.ConvTranspose2d(20, 8, 3), (1, 20, 8, 8), [("convolution", "input channels", 20, 24)]),
        (Fn(lambda x: x @ x.transpose(1, 2)), (2, 9, 16), [("gemm", "columns (N)", 9, 16),
                                                          ("gemm", "rows (M)", 9, 16)]),
        (Fn(lambda x: x @ x[0]), (16, 16), []),
        (Fn(lambda x: torch.addmm(x, x, x)), (12, 12), [("gemm", what, 12, 16) for what in
                                                       ("inner size (K)", "columns (N)", "rows (M)")]),
        (Fn(lambda x: F.scaled_dot_product_attention(x, x, x)), (1, 2, 5, 20),
         [("attention", "head size", 20, 24), ("attention", "head size of values", 20, 24)]),
    ],
    ids=["K", "N", "M", "one row", "vocabulary", "channels", "image", "depthwise", "groups", "transposed",
         "matmul", "vector", "addmm", "attention"],
)  # fmt: skip
def test_sizes(model: nn.Module, shape: tuple[int, ...], expected: list[tuple]) -> None:
    assert found(model, torch.randn(shape)) == expected


def test_it_says_where_and_what_to_do() -> None:
    (found,) = advice(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 5000 + 1)), torch.randn(8, 16))
    assert (found.node, found.module) == ("linear_1", "1")
    assert found.text == (
        "columns (N) 5001 is not a multiple of 8: pad the vocabulary (or the classes) to 5008"
    )


def test_ops_in_float32_get_none() -> None:
    model, x = nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 8)), torch.randn(8, 16)
    assert len(advice(model, x)) == 2
    assert len(advice(model, x, policy=Policy(rules={"1": "fp32"}))) == 1
    assert advice(model, x, policy="O0") == []


def test_symbolic_sizes_get_none() -> None:
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    assert advice(nn.Linear(16, 8), torch.randn(6, 16), dynamic_shapes=shapes) == []


def test_equal_advice_is_one_row_of_the_report() -> None:
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(5)))
    report = str(ampgraph.explain(ampgraph.convert(model, (torch.randn(8, 12),), dtype="float16")))
    assert "inner size (K) 12 is not a multiple of 8: make it 16      5  linear (0), linear_1 (1)," in report
    assert report.count("inner size (K)") == 1
    assert "advice" not in str(
        ampgraph.explain(ampgraph.convert(nn.Linear(8, 8), (torch.randn(8, 8),), dtype="float16"))
    )


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [
        ((6, 1), torch.float16, "capability 6.1, and float16 is fast from 7.0 on: it saves memory here"),
        ((7, 5), torch.float16, None),
        ((7, 5), torch.bfloat16, "bfloat16 is fast from 8.0 on: .* not time; float16 would be fast"),
        ((6, 1), torch.bfloat16, "not time$"),
        ((8, 0), torch.bfloat16, None),
    ],
)
def test_devices(
    capability: tuple[int, int], dtype: torch.dtype, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ampgraph.report.advice import _device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    found = _device(torch.device("cuda"), dtype)
    assert (found is None) == (message is None)
    if found and message:
        assert found.text.startswith("Old GPU has compute")
        assert __import__("re").search(message, found.text)
