"""The kernels of the finite check under Inductor: two more, for any number of parameters."""

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy
from ampgraph.training.gradient_boundary import non_finite, unscaled
from tests.inductor_schedule import scheduled


def unscale(gradients: list[torch.Tensor], inverse: torch.Tensor) -> list[torch.Tensor]:
    return list(unscaled(gradients, inverse))


def unscale_and_check(gradients: list[torch.Tensor], inverse: torch.Tensor) -> list[torch.Tensor]:
    true = unscaled(gradients, inverse)
    return [*true, non_finite(true, range(len(true)), len(true) + 1)]


def added(gradients: list[torch.Tensor]) -> tuple[int, int]:
    """Returns how many kernels and bytes the check adds."""
    inverse = torch.tensor(0.5)
    with torch.no_grad():
        without, both = (scheduled(f, gradients, inverse) for f in (unscale, unscale_and_check))
    return len(both.forward) - len(without.forward), both.bytes[0] - without.bytes[0]


def gradients(count: int) -> list[torch.Tensor]:
    """Returns gradients of different sizes, so that Inductor shares no kernel between them."""
    return [torch.randn(8 + i, 4) for i in range(count)]


@pytest.mark.parametrize(
    "count",
    [10, pytest.param(100, marks=pytest.mark.exhaustive), pytest.param(500, marks=pytest.mark.exhaustive)],
)
def test_check_adds_two_kernels_for_all_parameters(count):
    kernels, moved = added(gradients(count))
    assert kernels == 2
    # One float for each gradient, one flag, and neither gradient is read twice.
    assert moved <= 24 * count + 16


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((4, 3, 3, 3), torch.channels_last), ((4, 3, 2, 3, 3), torch.channels_last_3d)],
)
def test_channels_last_gradients_are_flattened_in_memory_order(shape, memory_format):
    assert added([torch.randn(shape).to(memory_format=memory_format), torch.randn(5)])[0] == 2


def test_backward_of_a_converted_model_has_two_kernels_more():
    model, x = nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(4))), torch.randn(2, 8)
    kernels = []
    for loss_scale in (NoLossScale(), DynamicLossScale()):
        policy = Policy(dtype=torch.float16, loss_scale=loss_scale)
        graph = ampgraph.convert(model, (x,), policy=policy, backend="eager").training_graph
        kernels.append(len(scheduled(lambda x, graph=graph: graph(x).sum(), x).backward))
    assert kernels[1] <= kernels[0] + 2
