"""What the backward of a trace may not ask its thread: autograd runs that of CUDA tensors in another one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampgraph.training.compiler_traces import traced_for_a_compiler
from ampgraph.training.gradient_boundary import unscale_gradients
from ampgraph.training.weight_gradient import low_weight_gradients, weight_gradient

BF16 = torch.bfloat16


def in_another_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_traced", [False, True])
def test_unscaling_for_a_compiler(is_traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler fuses single products and reductions; op by op, other kernels take less time."""
    lists: list[str] = []
    kernels = ["_foreach_mul", "_amp_foreach_non_finite_check_and_unscale_"]
    for name in kernels:
        run = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, name=name, run=run: lists.append(name) or run(*args))
    weight, probe = torch.randn(4, requires_grad=True), torch.zeros(2, requires_grad=True)

    def read() -> Tensor:
        return unscale_gradients(probe, torch.tensor(0.5), "0", weight)[0].sum()

    if is_traced:
        with traced_for_a_compiler():
            result = read()
    else:
        result = read()
    in_another_thread(result.backward)
    assert weight.grad.tolist() == [0.5] * 4
    assert lists == ([] if is_traced else kernels)


def test_low_gradients_of_weights() -> None:
    rows, weight = torch.randn(3, 8).to(BF16), torch.randn(8, 8, requires_grad=True)
    low = weight.detach().to(BF16)
    with low_weight_gradients():
        product = weight_gradient(rows, weight, None, rows @ low.t(), rows, low, True)
    in_another_thread(product.float().square().sum().backward)  # a CPU has no wide product
    assert torch.equal(weight.grad, weight.grad.to(BF16).float())
