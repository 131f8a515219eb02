"""Level O3: parameters that the graph reads low alone are stored low; float32 checkpoints still load."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampgraph

F16 = torch.float16
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

COPIES = [copy.deepcopy, lambda amp: pickle.loads(pickle.dumps(amp))]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())


@pytest.fixture
def net():
    return Net().eval()


def convert(model, *args, **kwargs):
    return ampgraph.convert(model, *args, policy="O3", dtype=F16, **kwargs)


def dtypes(model):
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


STORED = {
    "first.weight": F16,
    "first.bias": F16,
    "norm.weight": torch.float32,  # batch norm takes float32 beside a low input
    "norm.bias": torch.float32,
    "second.weight": F16,
    "second.bias": F16,
}


def test_low_parameters_the_same_objects(net):
    before, reference = list(net.parameters()), copy.deepcopy(net)
    amp = convert(net, (X,))
    assert dtypes(amp) == dtypes(net) == STORED
    assert all(a is b for a, b in zip(before, amp.parameters(), strict=True))
    assert [c for c in amp.plan.casts if c.is_parameter] == []
    with torch.no_grad():
        torch.testing.assert_close(amp(X), reference(X), rtol=5e-3, atol=5e-3)


def test_other_shapes_and_modes_are_captured_from_what_is_stored(net):
    reference = copy.deepcopy(net)
    amp = convert(net, (X,))
    for batch in (7, 9):
        x = torch.randn(batch, 8)
        with torch.no_grad():
            torch.testing.assert_close(amp(x), reference(x), rtol=5e-3, atol=5e-3)
    amp.train()
    reference.train()
    amp(X).square().mean().backward()
    reference(X).square().mean().backward()
    assert dtypes(net) == STORED
    assert net.first.weight.grad.dtype == F16
    torch.testing.assert_close(net.norm.bias.grad, reference.norm.bias.grad, rtol=5e-3, atol=5e-3)


def test_float32_checkpoints_load(net):
    checkpoint = {name: value * 2 for name, value in net.state_dict().items()}
    reference = copy.deepcopy(net)
    reference.load_state_dict(checkpoint)
    amp = convert(net, (X,))
    amp.load_state_dict(checkpoint)
    assert dtypes(net) == STORED
    with torch.no_grad():
        torch.testing.assert_close(amp(X), reference(X), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("again", COPIES)
def test_copies_capture_from_what_is_stored(net, again):
    amp = convert(net, (X,))
    other = again(amp)
    assert dtypes(other) == STORED
    with torch.no_grad():
        assert torch.equal(other(X), amp(X))


@pytest.mark.parametrize("again", COPIES)
def test_a_copy_stores_no_more_than_its_original(again):
    amp = convert(Net().train(), (X,))
    other = again(amp).eval()
    with torch.no_grad():
        other(X)
    assert set(dtypes(other).values()) == {torch.float32}
    assert other.stored_low == amp.stored_low == ()


def test_averaged_models_keep_float32_between_evaluations():
    amp = convert(Net().train(), (X,))
    averaged = AveragedModel(amp, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    with torch.no_grad():
        averaged.eval()(X)
    averaged.update_parameters(amp)
    averaged.update_parameters(amp)
    assert set(dtypes(averaged).values()) == {torch.float32}


def test_a_changed_model_stores_no_more():
    amp = convert(Net().train(), (X,)).eval()
    amp.source.first.register_forward_hook(lambda *_: None)  # drops all graphs
    with torch.no_grad():
        amp(X)
    assert set(dtypes(amp).values()) == {torch.float32}


@pytest.mark.parametrize("is_training", [False, True])
def test_reports_plan_again_with_what_is_stored(is_training):
    amp = convert(Net().train(is_training), (X,)).train(not is_training)
    with torch.no_grad():
        amp(X)
    explanation = ampgraph.explain(amp)
    assert explanation.under(amp.policy).totals == explanation.totals


def stepped(amp, optimizer):
    """Returns what ampgraph warns about in two steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            amp(X).square().mean().backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("again", [lambda amp: amp, *COPIES])
def test_training_stored_parameters_warns_once(net, again):
    amp = again(ampgraph.convert(net, (X,), policy="O3", dtype=torch.bfloat16))
    (message,) = stepped(amp, torch.optim.SGD(amp.parameters()))
    assert message.startswith("Net: level O3 has stored 4 of the parameters that SGD updates in bfloat16")
    assert "ampgraph.convert(model.train(), ...)" in message


def test_training_what_is_not_stored_does_not_warn(net):
    amp = ampgraph.convert(net, (X,), policy="O3", dtype=torch.bfloat16)
    assert stepped(amp, torch.optim.SGD(amp.norm.parameters())) == []
    trained = ampgraph.convert(Net().train(), (X,), policy="O3", dtype=torch.bfloat16)
    assert stepped(trained, torch.optim.SGD(trained.parameters())) == []


def test_a_parameter_that_a_later_capture_reads_in_float32():
    class TwoUses(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x, wide):
            with ampgraph.fp32_guard() if wide else ampgraph.fp16_guard():
                return nn.functional.linear(x, self.weight)

    model = TwoUses().eval()
    reference = copy.deepcopy(model)
    amp = convert(model, (X, False))
    assert model.weight.dtype == F16
    with torch.no_grad():
        torch.testing.assert_close(amp(X, True), reference(X, True), rtol=5e-3, atol=5e-3)
    (cast,) = [node for node in amp.graph_module.graph.nodes if node.target is torch.ops.aten.to.dtype]
    assert (cast.args[0].meta["val"].dtype, cast.meta["val"].dtype) == (F16, torch.float32)


def test_training_mode_and_just_in_time_keep_float32_and_read_shadows(net):
    amp = convert(net)
    amp(X)
    assert set(dtypes(net).values()) == {torch.float32}
    training = Net()
    convert(training, (X,))(X).sum().backward()
    assert set(dtypes(training).values()) == {torch.float32}


def test_a_failed_conversion_stores_nothing():
    class Fails(Net):
        def forward(self, x):
            if super().forward(x).sum() > 0:
                return x
            return -x

    model = Fails().eval()
    with pytest.raises(ampgraph.CaptureError):
        convert(model, (X,), capture="ahead of time")
    assert set(dtypes(model).values()) == {torch.float32}
