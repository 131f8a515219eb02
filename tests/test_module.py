"""`AmpModule` stands wherever the source model stood."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import ampgraph
from ampgraph import Policy

from .helpers import close, dtype_of

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CAPTURES = pytest.mark.parametrize("how", ["ahead of time", "just in time"])


class Net(nn.Module):
    """Linear, batch norm, dropout, a buffer, and some plain attributes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("offset", torch.ones(8))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.name, self.width = "net", 8

    def forward(self, x, scale: float = 1.0, *, shift=None):
        """Doc of forward."""
        y = self.drop(F.relu(self.norm(self.fc(x)))) * scale + self.offset
        return y if shift is None else y + shift

    def helper(self):
        return self.width * 2


def convert(model, how, *args, **options):
    return ampgraph.convert(model, args if how == "ahead of time" else None, **{"dtype": BF16, **options})


def test_parameters_and_buffers_are_the_sources_own():
    model = Net()
    amp = convert(model, "ahead of time", X)
    assert all(a is b for a, b in zip(amp.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(amp.buffers(), model.buffers(), strict=True))
    assert dict(amp.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert [n for n, _ in amp.named_modules()] == [n for n, _ in model.named_modules()]
    assert [n for n, _ in amp.named_children()] == [n for n, _ in model.named_children()]


def test_state_dict_has_the_sources_keys_and_loads_back():
    model = Net()
    amp = convert(model, "ahead of time", X)
    assert list(amp.state_dict()) == list(model.state_dict())
    assert list(amp.state_dict(prefix="p.")) == list(model.state_dict(prefix="p."))
    other = Net()
    assert amp.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(model.fc.weight, other.fc.weight)
    amp.eval(), other.eval()
    close(amp(X), other(X))
    with pytest.raises(RuntimeError, match="Missing key"):
        amp.load_state_dict({})


def test_state_dict_in_a_parent():
    model = Net()
    parent = nn.Sequential(convert(model, "ahead of time", X), nn.Linear(8, 2))
    assert list(parent.state_dict()) == list(nn.Sequential(Net(), nn.Linear(8, 2)).state_dict())
    parent.load_state_dict(nn.Sequential(Net(), nn.Linear(8, 2)).state_dict())
    assert len(list(parent.parameters())) == 6


def test_load_state_dict_with_assign():
    model = Net().eval()
    amp = convert(model, "ahead of time", X)
    other = Net().eval()
    amp.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=True)
    close(amp(X), other(X))


def test_signature_and_doc():
    amp = convert(Net(), "ahead of time", X)
    assert inspect.signature(amp.forward) == inspect.signature(Net().forward)
    assert amp.forward.__doc__ == "Doc of forward."


def test_attributes_and_methods():
    model = Net()
    amp = convert(model, "ahead of time", X)
    assert (amp.name, amp.width, amp.helper()) == ("net", 8, 16)
    assert amp.fc is model.fc
    amp.name = "other"
    assert model.name == "other"
    del amp.name
    assert not hasattr(model, "name")
    assert "helper" in dir(amp)
    with pytest.raises(AttributeError, match=r"Net.*nothing"):
        _ = amp.nothing


@CAPTURES
def test_a_replaced_parameter_and_buffer_are_used(how):
    model = Net().eval()
    amp = convert(model, how, X)
    amp(X)
    amp.fc.weight = nn.Parameter(torch.zeros(8, 8))
    amp.fc.bias = nn.Parameter(torch.zeros(8))
    amp.offset = torch.full((8,), 5.0)
    close(amp(X), model(X), 0.01)


@CAPTURES
def test_a_replaced_submodule_is_used(how):
    model = Net().eval()
    amp = convert(model, how, X)
    amp(X)
    amp.fc = nn.Linear(8, 8)
    close(amp(X), model(X), 0.02)


class Gained(nn.Linear):
    """A linear layer with a gain, which may be missing."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_parameter("gain", None)

    def forward(self, x):
        x = super().forward(x)
        return x if self.gain is None else x * self.gain


def appended(model):
    model.append(nn.Linear(8, 8))


def cut(model):
    del model[1]


def left_out(model):
    model[2] = nn.Identity()


def swapped(model):
    model[1] = nn.Tanh()


def put_inside(model):
    nn.utils.parametrizations.weight_norm(model[2])


def renamed(model):
    """Its module stays; what was ``weight`` is a plain tensor of that name, made of ``weight_orig``."""
    prune.l1_unstructured(model[0], "weight", 0.5)


def filled(model):
    """A parameter that was None from the start."""
    model[0].gain = nn.Parameter(torch.full((8,), 3.0))


def emptied(model):
    model[2].bias = None


@CAPTURES
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("change", [appended, cut, left_out, swapped, put_inside, renamed, filled, emptied])
def test_another_structure_is_captured_again(change, level, how):
    """Gradients of parameters that came later are unscaled too."""
    model = nn.Sequential(Gained(8, 8), nn.ReLU(), nn.Linear(8, 8))
    amp = convert(model, how, X, policy=level, dtype=torch.float16)
    amp(X)
    change(model)
    close(amp(X), model(X), 0.01)
    model(X).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    amp(X).square().mean().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        close(parameter.grad, grad, 0.01)


@CAPTURES
def test_a_buffer_that_is_filled_later_is_read(how):
    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("shift", None)

        def forward(self, x):
            x = super().forward(x)
            return x if self.shift is None else x + self.shift

    model = Shifted()
    amp = convert(model, how, X)
    amp(X)
    model.shift = torch.full((8,), 3.0)
    close(amp(X), model(X), 0.01)


def test_many_captures_are_told(caplog):
    """A number is part of the graph, so each number is captured."""
    amp = convert(Net(), "ahead of time", X)
    for step in range(10):
        amp(X, float(step + 2))
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [message.partition(";")[0] for message in told] == [
        "Net was captured 8 times for different shapes, arguments or values"
    ]


@CAPTURES
def test_a_model_without_values_gets_them_later(how):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    real = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    amp = convert(model, how, X.to("meta"), policy="O2", dtype=torch.float16, backend="aot_eager")
    amp.load_state_dict(real.state_dict(), assign=True)
    close(amp(X), real(X), 0.01)
    amp(X).square().mean().backward()
    assert amp.scaler.state.scale.device.type == "cpu"
    assert all(p.grad is not None for p in amp.parameters())


def test_a_parameter_changed_in_the_source_is_used():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    amp = convert(model, "ahead of time", X)
    amp(X)
    model[0].weight.data.zero_()
    close(amp(X), model(X), 0.01)


def test_deepcopy_is_independent():
    model = Net().eval()
    amp = convert(model, "ahead of time", X)
    twin = copy.deepcopy(amp)
    assert twin.fc.weight is not amp.fc.weight
    assert twin.policy == amp.policy
    with torch.no_grad():
        twin.fc.weight.zero_()
    close(amp(X), model(X))
    close(twin(X), twin.source(X))


class NotesItsModule:
    """A hook that can be pickled."""

    seen: nn.Module | None = None

    def __call__(self, module, args, output):
        self.seen = module


@CAPTURES
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda amp: pickle.loads(pickle.dumps(amp))])
def test_copies_have_the_hooks(copied, how):
    amp = convert(Net().eval(), how, X)
    hook = NotesItsModule()
    amp.register_forward_hook(hook)
    amp(X)
    twin = copied(amp)
    twin(X)
    (of_twin,) = twin._forward_hooks.values()
    assert of_twin.seen is twin
    assert hook.seen is amp


def test_hooks_of_the_state_run():
    amp = convert(Net().eval(), "ahead of time", X)
    seen = []
    amp.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(extra=torch.ones(1)))
    amp.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append(state.pop("extra")))
    assert "extra" in nn.Sequential(amp).state_dict()
    amp.load_state_dict(amp.state_dict())
    assert len(seen) == 1


def test_pickle_and_torch_save():
    amp = convert(Net().eval(), "ahead of time", X)
    again = pickle.loads(pickle.dumps(amp))
    assert torch.equal(again(X), amp(X))
    stream = io.BytesIO()
    torch.save(amp, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(X), amp(X))
    stream = io.BytesIO()
    torch.save(amp.state_dict(), stream)
    stream.seek(0)
    amp.load_state_dict(torch.load(stream))


@CAPTURES
def test_to_dtype_captures_again(how):
    model = Net().eval()
    amp = convert(model, how, X)
    amp(X)
    assert amp.to(torch.float64) is amp
    assert model.fc.weight.dtype == torch.float64
    assert torch.allclose(amp(X.double()), model(X.double()), atol=1e-6)
    amp.float()
    close(amp(X), model(X))


def test_to_moves_constants_too():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.table = torch.arange(8.0)

        def forward(self, x):
            return self.fc(x) + self.table

    amp = convert(Constant(), "ahead of time", X)
    amp(X)
    amp.to("meta")
    assert all(p.device.type == "meta" for p in amp.parameters())


@CAPTURES
def test_train_and_eval(how):
    model = Net()
    amp = convert(model, how, X)
    torch.manual_seed(0)
    trained = amp(X)
    amp.eval()
    assert not model.training
    assert not model.drop.training
    close(amp(X), model(X))
    assert torch.equal(amp(X), amp(X))
    amp.train()
    assert model.norm.training
    torch.manual_seed(0)
    assert trained.shape == amp(X).shape
    assert (amp(X) == 1.0).any()  # dropped values leave the offset


def test_graph_module_is_the_current_modes():
    amp = convert(Net(), "ahead of time", X)
    train_graph = amp.graph_module
    amp.eval()
    amp(X)
    assert amp.graph_module is not train_graph
    amp.train()
    assert amp.graph_module is train_graph


@CAPTURES
def test_eval_of_one_submodule_only(how):
    model = Net()
    amp = convert(model, how, X)
    amp(X)
    model.drop.eval()
    model.norm.eval()
    before = model.norm.running_mean.clone()
    assert torch.equal(amp(X), amp(X))
    assert torch.equal(model.norm.running_mean, before)


@CAPTURES
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_running_statistics_move_as_in_the_source(how, level):
    """Bitwise under O0, closely otherwise, and once a call."""
    source, model = Net(), Net()
    model.load_state_dict(source.state_dict())
    amp = convert(model, how, X, policy=level)
    for _ in range(3):
        x = torch.randn(16, 8)
        source(x)
        amp(x)
    ours, theirs = model.norm, source.norm
    assert int(ours.num_batches_tracked) == 3
    if level == "O0":
        assert torch.equal(ours.running_mean, theirs.running_mean)
        assert torch.equal(ours.running_var, theirs.running_var)
    close(ours.running_mean, theirs.running_mean, 0.02)
    close(ours.running_var, theirs.running_var, 0.02)
    assert ours.running_mean.dtype == FP32


def test_conversion_leaves_the_mode_alone():
    model = Net().eval()
    amp = ampgraph.convert(model, (X,))
    assert not amp.training
    assert not model.training


def test_capture_does_not_move_running_statistics():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    convert(model, "ahead of time", X)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@CAPTURES
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_gives_fp32_gradients_close_to_the_sources(how, level):
    source = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    model = copy.deepcopy(source)
    amp = convert(model, how, X, policy=level)
    F.cross_entropy(source(X), torch.tensor([0, 1, 2, 3])).backward()
    F.cross_entropy(amp(X), torch.tensor([0, 1, 2, 3])).backward()
    for ours, theirs in zip(amp.parameters(), source.parameters(), strict=True):
        assert ours.grad.dtype == FP32
        close(ours.grad, theirs.grad, 0.05)


@CAPTURES
def test_tied_parameters_stay_tied(how):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model, ids = Tied(), torch.tensor([[1, 2, 3]])
    amp = convert(model, how, ids)
    amp(ids).sum().backward()
    assert amp.embed.weight is amp.head.weight
    assert len(list(amp.parameters())) == 1
    reference = copy.deepcopy(model)
    reference.zero_grad()
    reference(ids).sum().backward()
    close(model.head.weight.grad, reference.head.weight.grad, 0.03)


@CAPTURES
def test_frozen_parameters_get_no_gradient(how):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    amp = convert(model, how, X)
    amp(X).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


@CAPTURES
def test_freezing_after_capture(how):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    amp = convert(model, how, X)
    amp(X)
    amp.requires_grad_(False)
    assert not amp(X).requires_grad
    amp.requires_grad_(True)
    assert amp(X).requires_grad


@CAPTURES
def test_inference_mode_and_no_grad_around_the_call(how):
    amp = convert(nn.Linear(8, 8), how, X)
    with torch.no_grad():
        assert not amp(X).requires_grad
    with torch.inference_mode():
        assert amp(X).is_inference()
    assert amp(X).requires_grad


def test_converted_under_no_grad_still_trains():
    with torch.no_grad():
        amp = convert(nn.Linear(8, 8), "ahead of time", X)
    amp(X).sum().backward()
    assert amp.weight.grad is not None


@CAPTURES
def test_module_hooks_run(how):
    calls = []
    amp = convert(nn.Linear(8, 8), how, X)
    amp.register_forward_hook(lambda *a: calls.append("forward"))
    amp.register_forward_pre_hook(lambda *a: calls.append("before"))
    amp(X)
    assert calls == ["before", "forward"]


@CAPTURES
def test_backward_hooks_run(how):
    model = Net()
    amp = convert(model, how, X)
    seen = []
    amp.register_full_backward_hook(lambda module, *grads: seen.append(module))
    amp(X).sum().backward()
    assert seen == [amp]


def test_zero_grad_and_apply():
    model = Net()
    amp = convert(model, "ahead of time", X)
    amp(X).sum().backward()
    amp.zero_grad()
    assert model.fc.weight.grad is None
    seen = []
    amp.apply(lambda m: seen.append(type(m).__name__))
    assert "Linear" in seen


def test_inside_another_module():
    inner = convert(nn.Linear(8, 8), "ahead of time", X)
    outer = nn.Sequential(inner, nn.ReLU())
    outer.eval()
    assert not inner.source.training
    close(outer(X), F.relu(inner.source(X)))


def test_printing_names_the_model_and_the_policy():
    amp = convert(Net(), "ahead of time", X)
    assert "Net" in repr(amp)
    assert "O1" in repr(amp)


def test_policy_is_complete():
    assert ampgraph.convert(nn.ReLU(), (X,)).policy == Policy(dtype=BF16)


def test_graph_before_the_first_call_says_what_to_do():
    with pytest.raises(ampgraph.CaptureError, match="call the converted model once"):
        _ = ampgraph.convert(nn.ReLU()).graph_module


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_outputs_keep_their_dtype_unless_told(level):
    model = nn.Linear(8, 8)
    assert convert(model, "ahead of time", X, policy=level)(X).dtype == FP32
    policy = Policy(level=level, keep_io_dtypes=False)
    assert ampgraph.convert(model, (X,), policy=policy)(X).dtype == BF16


def test_o0_is_the_source_bit_for_bit():
    model = Net().eval()
    amp = convert(model, "ahead of time", X, policy="O0")
    assert torch.equal(amp(X), model(X))
    assert set(dtype_of(amp.graph_module, "linear")) == {FP32}


class FrozenNorm(nn.Sequential):
    """Overrides methods of `nn.Module`, as models do that keep a batch norm in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self

    def parameters(self, recurse=True):
        return self[0].parameters(recurse)

    def to(self, *args, **kwargs):
        self.moved = args
        return super().to(*args, **kwargs)


@CAPTURES
def test_overridden_methods_of_nn_module_are_the_sources(how):
    model = FrozenNorm(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()
    amp = convert(model, how, X).eval()
    assert amp.train() is amp
    assert (amp.training, model[0].training, model[1].training) == (True, True, False)
    amp(X)
    assert model[1].num_batches_tracked == 0
    assert len(list(amp.parameters())) == 2
    assert amp.to(torch.float64) is amp
    assert model.moved == (torch.float64,)
    assert torch.allclose(amp(X.double()), model(X.double()))


def test_methods_patched_on_the_instance_are_used():
    model = FrozenNorm(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    model.train = lambda mode=True: model
    amp = ampgraph.convert(model)
    assert amp.train() is model
    assert not amp.training
    amp.eval = lambda: "patched later"
    assert amp.eval() == "patched later"
    del model.train, amp.eval
    assert amp.train().training


def _in_a_closure(forward):
    return lambda *args: 2 * forward(*args)


def _decorated(forward):
    @functools.wraps(forward)
    def inner(*args):
        return 2 * forward(*args)

    return functools.partial(inner)


class _Doubling:
    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *args):
        return 2 * self.forward(*args)


def _by_a_global(forward):
    globals()["_wrapped_forward"] = forward
    return lambda *args: 2 * _wrapped_forward(*args)  # noqa: F821


@CAPTURES
@pytest.mark.parametrize("wrap", [_in_a_closure, _decorated, _Doubling, _by_a_global])
def test_a_function_around_forward_runs_around_the_converted_model(how, wrap):
    model = Net().eval()
    amp = convert(model, how, X)
    alone = amp(X)
    amp.forward = wrap(amp.forward)
    assert torch.equal(amp(X), 2 * alone)
    assert torch.equal(amp(X[:2]), 2 * alone[:2])
    assert "forward" not in vars(model)
    del amp.forward
    assert torch.equal(amp(X), alone)


def test_a_forward_of_the_source_that_calls_the_converted_model_is_an_error():
    model = Net().eval()
    amp = convert(model, "ahead of time", X)
    calls = [amp]
    model.forward = lambda *args: calls[0](*args)
    with pytest.raises(ampgraph.CaptureError, match="calls the converted model"):
        amp(X)


@CAPTURES
def test_another_forward_is_captured_and_can_be_taken_back(how):
    model = Net().eval()
    amp = convert(model, how, X)
    alone, saved = amp(X), amp.forward
    amp.forward = lambda x: model.fc(x) * 3
    close(amp(X), model.fc(X) * 3)
    amp.forward = saved
    assert torch.equal(amp(X), alone)
    with mock.patch.object(amp, "forward", lambda x: model.fc(x) * 5):
        close(amp(X), model.fc(X) * 5)
    assert torch.equal(amp(X), alone)
    assert "forward" not in vars(model)
