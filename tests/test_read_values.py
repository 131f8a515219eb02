"""Values of tensors that forward reads as Python's: a graph has the numbers of its capture."""

import pytest
import torch
from torch import nn

import ampgraph

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SHARED = torch.tensor(2.0)


class Scaled(nn.Module):
    """Has a tensor that is no buffer."""

    def __init__(self, scale):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), scale
        self.factor, self.factors = torch.tensor(2.0), [torch.tensor([2.0, 3.0])]

    def forward(self, x):
        return self.fc(x) * self.scale(self)


SCALES = {
    "item": lambda model: model.factor.item(),
    "float": lambda model: float(model.factor),
    "int": lambda model: int(model.factor),
    "in a list": lambda model: model.factors[0].tolist()[0],
    "global": lambda model: SHARED.item(),
    "equal": lambda model: 3 if torch.equal(model.factor, model.factors[0][0]) else 1,
    "truth": lambda model: 3 if model.factor else 1,
}
CHANGES = {
    "in place": lambda tensor: tensor.fill_(0.0),
    "data": lambda tensor: setattr(tensor, "data", torch.full_like(tensor, 5.0)),
}


@pytest.mark.filterwarnings("ignore:.*captured just in time instead")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SCALES)
def test_a_value_that_changes_is_read_again(name, change):
    model = Scaled(SCALES[name])
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)
    SHARED.fill_(2.0)
    for tensor in (model.factor, SHARED, model.factors[0]):
        CHANGES[change](tensor)
        torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)


def test_a_value_that_stays_has_one_graph():
    model = Scaled(SCALES["item"])
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
    for _ in range(3):
        amp(X)
    model.factors[0].fill_(7.0)  # which forward does not read
    amp(X)
    assert len(amp.graph_modules) == 1
