"""A forward that converts a module's parameters, as routers of mixtures of experts do."""

import pytest
import torch
from torch import nn

import ampgraph

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.classifier = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        self.classifier = self.classifier.to(torch.float32)
        return self.classifier(self.layer(x).to(torch.float32)).softmax(-1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", [True, False], ids=["gradients first", "no_grad first"])
def test_just_in_time(first, backend):
    model = Routed()
    amp = ampgraph.convert(model, policy="O1", dtype=torch.bfloat16, backend=backend)
    optimizer = torch.optim.SGD(amp.parameters(), 0.5)
    for gradients in (first, not first, first, not first):
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16):
            expected = model(X)
        with torch.set_grad_enabled(gradients):
            found = amp(X)
        torch.testing.assert_close(found, expected.float(), rtol=2**-7, atol=2**-7)
        if gradients:
            found[:, 0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(amp.graph_modules) == 2


def test_ahead_of_time_it_says_what_helps():
    with pytest.warns(UserWarning, match=r"Couldn't swap Linear.weight.* Convert parameters before the call"):
        ampgraph.convert(Routed(), (X,), dtype=torch.bfloat16)
