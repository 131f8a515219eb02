"""The kernels of the finite check under Inductor: two more, for any number of parameters."""

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy
from ampgraph.training.gradient_boundary import non_finite, unscaled
from tests.inductor_schedule import scheduled


def unscale(gradients: list[torch.Tensor], inverse: torch.Tensor) -> list[torch.Tensor]:
    return list(unscaled(gradients, inverse, one_by_one=True))


def unscale_and_check(gradients: list[torch.Tensor], inverse: torch.Tensor) -> list[torch.Tensor]:
    true = unscaled(gradients, inverse, one_by_one=True)
    return [*true, non_finite(true, range(len(true)), len(true) + 1, fuses=True)]


def moved(function, gradients: list[torch.Tensor]) -> tuple[int, int]:
    """Returns the kernels and the bytes that Inductor schedules."""
    with torch.no_grad():
        found = scheduled(function, gradients, torch.tensor(0.5))
    return len(found.forward), found.bytes[0]


def unscaling_moves(gradients: list[torch.Tensor]) -> tuple[int, int]:
    """One kernel for each gradient reads it and the inverse, and writes it."""
    return len(gradients), sum(2 * g.nbytes + 4 for g in gradients)


def different(count: int) -> list[torch.Tensor]:
    """Returns gradients of different sizes, so that Inductor shares no kernel between them."""
    return [torch.randn(8 + i, 4) for i in range(count)]


def test_unscaling_alone():
    assert moved(unscale, different(10)) == unscaling_moves(different(10))


@pytest.mark.parametrize(
    "count",
    [10, pytest.param(100, marks=pytest.mark.exhaustive), pytest.param(500, marks=pytest.mark.exhaustive)],
)
def test_check_adds_two_kernels_for_all_parameters(count):
    gradients = different(count)
    kernels, read_and_written = moved(unscale_and_check, gradients)
    kernels_without, without = unscaling_moves(gradients)
    assert kernels - kernels_without == 2
    # One float for each gradient, one flag, and neither gradient is read twice.
    assert read_and_written - without <= 24 * count + 16


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((4, 3, 3, 3), torch.channels_last), ((4, 3, 2, 3, 3), torch.channels_last_3d)],
)
def test_channels_last_gradients_are_flattened_in_memory_order(shape, memory_format):
    gradients = [torch.randn(shape).to(memory_format=memory_format), torch.randn(5)]
    assert moved(unscale_and_check, gradients)[0] - moved(unscale, gradients)[0] == 2


def test_backward_of_a_converted_model_has_two_kernels_more():
    model, x = nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(4))), torch.randn(2, 8)
    kernels = []
    for loss_scale in (NoLossScale(), DynamicLossScale()):
        policy = Policy(dtype=torch.float16, loss_scale=loss_scale)
        graph = ampgraph.convert(model, (x,), policy=policy, backend="eager").training_graph
        kernels.append(len(scheduled(lambda x, graph=graph: graph(x).sum(), x).backward))
    assert kernels[1] <= kernels[0] + 2
