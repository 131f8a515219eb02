"""Just in time, a hook that stops the capture of a model leaves no trace when it is removed."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import ampgraph

X = torch.randn(4, 8)


def show(module, args, output):
    print(end="")


def numbers(module, args, output):
    output.detach().float().numpy()


def scale(module, args, output):
    return output * 2


def look(module, grads, _):
    return None


REGISTER = {
    "prints": lambda layer: layer.register_forward_hook(show),
    "reads numbers": lambda layer: layer.register_forward_hook(numbers),
    "backward": lambda layer: layer.register_full_backward_hook(look),
}


def model_and_source(capture: str) -> tuple[ampgraph.AmpModule, nn.Sequential]:
    source = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    examples = None if capture == "just in time" else (X,)
    return ampgraph.convert(source, examples, dtype=torch.bfloat16, capture=capture), source


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("capture", ["just in time", "auto"])
@pytest.mark.parametrize("kind", REGISTER)
def test_the_model_is_low_again_without_the_hook(kind, capture):
    amp, source = model_and_source(capture)
    before = amp(X)
    hook = REGISTER[kind](source[2])
    amp(X).sum().backward()
    hook.remove()
    for _ in range(2):
        after = amp(X)
        after.sum().backward()
        assert torch.equal(after, before)
    assert not torch.equal(before, source(X))


def test_the_first_hook_in_another_dict():
    amp, source = model_and_source("just in time")
    amp(X)
    source[2]._forward_hooks = OrderedDict()
    source[2].register_forward_hook(lambda module, args, output: output * 0 + 100)
    assert torch.equal(amp(X), torch.full((4, 8), 100.0))


def test_a_hook_with_which_nothing_is_captured_is_told():
    amp, source = model_and_source("just in time")
    amp(X)
    source[2].register_forward_hook(show)
    with pytest.warns(UserWarning, match="unconverted in this call.*the hooks of these modules: 2"):
        result = amp(X)
    assert torch.equal(result, source(X))


def test_hooks_of_the_same_code_share_what_is_compiled():
    amp, source = model_and_source("just in time")
    expected = {False: amp(X)}
    for _ in range(3):
        hook = source[2].register_forward_hook(scale)
        expected.setdefault(True, amp(X))
        assert torch.equal(amp(X), expected[True])
        hook.remove()
        assert torch.equal(amp(X), expected[False])
    assert not torch.equal(expected[True], expected[False])
    assert len(amp.graph_modules) == 2


def test_many_kinds_of_hooks():
    amp, source = model_and_source("just in time")
    amp(X)
    for factor in range(12):  # each has other code
        namespace: dict = {}
        exec(f"def hook(module, args, output): return output * {factor}", namespace)
        handle = source[2].register_forward_hook(namespace["hook"])
        torch.testing.assert_close(amp(X), source(X), rtol=0.05, atol=0.05)
        handle.remove()
    assert not torch.equal(amp(X), source(X))
