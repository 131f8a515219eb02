"""Memory of low copies: as that of the parameters where cuDNN wants it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ampgraph.runtime import empty_copies as subject


class OnCuda(Tensor):
    """A tensor that says it is on CUDA."""

    is_cuda = True  # type: ignore[assignment]


def packed(*sizes: tuple[int, ...], spare: int = 0, gap: int = 0) -> list[Tensor]:
    """Returns tensors side by side in one memory, as `flatten_parameters` lays them out."""
    count = sum(torch.Size(size).numel() + gap for size in sizes) + spare
    memory, tensors, start = torch.randn(count), [], 0
    for size in sizes:
        tensors.append(memory[start : start + torch.Size(size).numel()].view(size).as_subclass(OnCuda))
        start += torch.Size(size).numel() + gap
    return tensors


def addresses(tensors: list[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def test_copies_of_packed_weights_are_packed_alike() -> None:
    masters = packed((4, 3), (4, 2), (4,), (4,))
    copies = subject.empty_copies([masters[2], masters[0], masters[3], masters[1]], torch.bfloat16)
    copies = [copies[i] for i in (1, 3, 0, 2)]
    torch._foreach_copy_(copies, masters)
    assert len(addresses(copies)) == 1
    for copy, master in zip(copies, masters, strict=True):
        assert copy.dtype == torch.bfloat16
        assert (copy.shape, copy.stride(), copy.storage_offset()) == (
            master.shape,
            master.stride(),
            master.storage_offset(),
        )
        torch.testing.assert_close(copy, master.as_subclass(Tensor).bfloat16(), rtol=0, atol=0)
    before = [copy._version for copy in copies]
    copies[0].zero_()
    assert [copy._version - b for copy, b in zip(copies, before, strict=True)] == [1, 0, 0, 0]


TIED = torch.randn(3).as_subclass(OnCuda)


@pytest.mark.parametrize(
    "masters",
    [
        packed((4, 3), (4,), spare=1),
        packed((4, 3), (4,), gap=1),
        packed((4, 3)),
        [t.as_subclass(Tensor) for t in packed((4, 3), (4,))],
        [TIED, TIED.view(3)],
        packed((4, 3), (4,))[:1],
    ],
    ids=["more memory", "gaps", "one", "on a CPU", "tied", "a part"],
)
def test_other_copies_are_apart(masters) -> None:
    assert len(addresses(subject.empty_copies(masters, torch.float16))) == len(masters)
