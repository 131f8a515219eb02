"""Low gradients of CUDA parameters become float32 in one list; the function runs on a CPU, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ampgraph.training.low_copies import _widened


def low(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


GRADIENTS = {
    "contiguous": low(3, 4),
    "transposed": low(3, 4).t(),
    "channels last": low(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "of a sum": low(1).expand(5),
    "a scalar": low(),
    "empty": low(0, 4),
}


def test_gradients_are_as_casts_give_them() -> None:
    given = [*GRADIENTS.values(), None]
    with torch.no_grad():  # as in a backward
        widened = _widened(given)
    for found, gradient in zip(widened, given, strict=True):
        if gradient is None:
            assert found is None
            continue
        expected = gradient.to(torch.float32)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.stride() == expected.stride()


OTHERS = {"float32": torch.ones(3), "sparse": low(3).to_sparse(), "subclass": torch.nn.Parameter(low(3))}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_others_stay(other) -> None:
    with torch.no_grad():
        found = _widened([low(2), other])
    assert found[1] is other
    assert found[0].dtype == torch.float32


def test_what_takes_part_in_a_second_derivative_stays() -> None:
    gradient = low(3)
    with torch.enable_grad():
        assert _widened([gradient])[0] is gradient


def test_batches_of_gradients_stay() -> None:
    with torch.no_grad():
        found = torch.vmap(lambda g: _widened([g])[0])(low(2, 3))
    assert found.dtype == torch.bfloat16
