"""Modules that forward uses and that are no parts of the model: what becomes of them, and of the graph."""

import copy
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn

import ampgraph

X = torch.randn(4, 8)


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)


class Student(nn.Module):
    """Has its teacher in a list, so that it is no part."""

    def __init__(self):
        super().__init__()
        self.own, self.hidden = nn.Linear(8, 8), [frozen()]

    def forward(self, x):
        return self.own(x) - self.hidden[0](x)


def average(teacher):
    for parameter in teacher.parameters():
        parameter.data = parameter.data * 0.1 + 1.0


def other_parameter(teacher):
    teacher[0].weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)


def other_dtype_and_back(teacher):
    teacher.double()
    for parameter in teacher.parameters():
        parameter.data.mul_(-3)
    teacher.float()


def vector(teacher):
    nn.utils.vector_to_parameters(torch.randn(72), teacher.parameters())


def other_child(teacher):
    teacher[0] = frozen()[0]


def more_layers(teacher):
    teacher.append(nn.Linear(8, 8).requires_grad_(False))


def other_forward(teacher):
    teacher[1].forward = lambda y: y * 9


def hook(teacher):
    teacher[0].register_forward_hook(lambda module, args, y: y * 3)


LIVE = [average, other_parameter, vector, other_dtype_and_back]
OTHER = [other_child, more_layers, other_forward, hook]


@pytest.mark.parametrize("change", LIVE + OTHER)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_change_of_a_hidden_teacher_shows(change, backend):
    torch.manual_seed(0)
    model = Student()
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, backend=backend)
    amp(X).sum().backward()
    change(model.hidden[0])
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)
    assert len(amp.graph_modules) == (1 if change in LIVE else 2)


def test_a_teacher_in_another_dtype_is_captured_again():
    model = Student()
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    model.hidden[0].double()
    with pytest.raises(RuntimeError, match="dtype"):
        model(X)
    with pytest.raises(RuntimeError, match="dtype"):
        amp(X)


def test_a_teacher_follows_its_average_without_captures():
    torch.manual_seed(0)
    model = Student()
    amp = ampgraph.convert(model, (X,), dtype=torch.float16)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        amp(X).square().mean().backward()
        optimizer.step()
        average(model.hidden[0])
        torch.testing.assert_close(amp(X), model(X), rtol=0.01, atol=0.01)
    assert len(amp.graph_modules) == 1


def test_a_copy_has_a_teacher_of_its_own():
    amp = ampgraph.convert(Student(), (X,), dtype=torch.bfloat16)
    other = copy.deepcopy(amp)
    average(other.source.hidden[0])
    torch.testing.assert_close(other(X), other.source(X), rtol=0.05, atol=0.05)
    torch.testing.assert_close(amp(X), amp.source(X), rtol=0.05, atol=0.05)
    assert not torch.allclose(amp(X), other(X), rtol=0.05, atol=0.05)


class Applies(nn.Module):
    """Calls a function of the hidden teacher."""

    def __init__(self, function, teacher=None):
        super().__init__()
        self.own, self.hidden, self.function = nn.Linear(8, 8), [teacher or frozen()], function

    def forward(self, x):
        return self.own(x) + self.function(self.hidden[0], x)


def right(amp):
    got, expected = amp(X), amp.source(X)
    return bool((got - expected).norm() <= 0.02 * expected.norm())


def test_a_functional_call_of_the_teacher_leaves_its_parameters():
    teacher = frozen()
    other = {name: torch.randn_like(p) for name, p in teacher.named_parameters()}
    before = dict(teacher.named_parameters())
    amp = ampgraph.convert(
        Applies(lambda t, x: torch.func.functional_call(t, other, (x,)), teacher), (X,), dtype=torch.bfloat16
    )
    assert right(amp)
    assert not amp.is_just_in_time
    after = dict(teacher.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is p for name, p in before.items())


USES = {
    "parameters": lambda t, x: sum(p.sum() for p in t.parameters()),
    "an alias": lambda t, x: (t[0].weight - ALIASES[t]).sum() + t[0](x),
}
ALIASES = {}


@pytest.mark.parametrize("use", USES)
def test_parameters_that_are_read_without_a_call(use):
    torch.manual_seed(0)
    model = Applies(USES[use])
    ALIASES[model.hidden[0]] = model.hidden[0][0].weight.detach()
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    assert right(amp)
    average(model.hidden[0])
    assert right(amp)
    assert len(amp.graph_modules) == 1


def test_a_parameter_in_a_list_follows_its_data():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.hidden = nn.Linear(8, 8), [nn.Parameter(torch.ones(8), requires_grad=False)]

        def forward(self, x):
            return self.own(x) * self.hidden[0]

    amp = ampgraph.convert(Holds(), (X,), dtype=torch.bfloat16)
    amp.source.hidden[0].data = torch.full((8,), 5.0)
    assert right(amp)


def test_another_buffer_of_the_teacher_is_captured_again():
    teacher = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval().requires_grad_(False)
    amp = ampgraph.convert(Applies(lambda t, x: t(x), teacher), (X,), dtype=torch.bfloat16)
    amp(X)
    teacher[1].running_mean = torch.full((8,), 5.0)
    assert right(amp)
    teacher[1].running_mean.fill_(-5.0)
    assert right(amp)
    assert len(amp.graph_modules) == 2


def test_a_teacher_that_is_untied_from_the_model():
    model = Applies(lambda t, x: t(x), nn.Linear(8, 8).requires_grad_(False))
    model.hidden[0].weight = model.own.weight
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    assert right(amp)
    model.hidden[0].weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    assert right(amp)


def test_a_teacher_that_becomes_trainable_gets_its_gradients():
    model = Applies(lambda t, x: t(x))
    amp = ampgraph.convert(model, (X,), dtype=torch.float16)
    amp(X).mean().backward()
    model.hidden[0].requires_grad_(True)
    with pytest.warns(UserWarning, match="captured just in time"):
        amp(X).mean().backward()
    found = [p.grad for p in model.hidden[0].parameters()]
    model.hidden[0].zero_grad()
    model(X).mean().backward()
    for gradient, parameter in zip(found, model.hidden[0].parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0.01, atol=1e-3)


def test_a_teacher_stays_in_float32_where_the_model_is_stored_low():
    model = Applies(lambda t, x: t(x)).eval()
    expected = model(X)
    amp = ampgraph.convert(model, (X,), policy="O3", dtype=torch.bfloat16)
    assert amp.stored_low == ("own.weight", "own.bias")
    assert {p.dtype for p in model.hidden[0].parameters()} == {torch.float32}
    torch.testing.assert_close(amp(X), expected, rtol=0.05, atol=0.05)


STRENGTH = 1.0


class Strong(nn.Module):
    def forward(self, x):
        return x * STRENGTH


class Amplifies:
    strength = 1.0

    def __call__(self, module, args, y):
        return y * self.strength


@pytest.mark.parametrize("what", ["a global", "a hook"])
def test_what_the_code_of_the_teacher_reads(what, monkeypatch):
    teacher, hook = Strong(), Amplifies()
    teacher.register_forward_hook(hook)
    amp = ampgraph.convert(Applies(lambda t, x: t(x), teacher), (X,), dtype=torch.bfloat16)
    assert right(amp)
    if what == "a global":
        monkeypatch.setitem(globals(), "STRENGTH", 3.0)
    else:
        hook.strength = 3.0
    assert right(amp)
    assert len(amp.graph_modules) == 2


class Neuron(nn.Module):
    instances: ClassVar[list[nn.Module]] = []

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.full((8,), 7.0), persistent=False)
        self.trace = torch.full((8,), 7.0)
        Neuron.instances.append(self)


def reset(neuron):
    neuron.memory = torch.zeros_like(neuron.memory)


def set_trace(neuron):
    neuron.trace = neuron.trace * 2


def delete(neuron):
    del neuron.memory
    neuron.register_buffer("memory", torch.zeros(8))


def register(neuron):
    neuron.register_buffer("memory", torch.zeros(8))


class Resets(nn.Module):
    """Resets all neurons of the process, as snnTorch does."""

    def __init__(self, change, asks=False):
        super().__init__()
        self.own, self.change, self.asks = nn.Linear(8, 8), change, asks

    def forward(self, x):
        if self.asks:  # the capture of a call fails, and an export is tried
            torch.compiler.is_exporting()
        for neuron in Neuron.instances:
            self.change(neuron)
        return self.own(x) + Neuron.instances[0].memory + Neuron.instances[0].trace


@pytest.mark.parametrize("change", [reset, set_trace, delete, register])
@pytest.mark.parametrize("asks", [False, True])
def test_a_conversion_leaves_modules_outside_as_they_were(change, asks):
    Neuron.instances.clear()
    neuron = Neuron()
    memory, trace = neuron.memory, neuron.trace
    model = Resets(change, asks)
    with pytest.warns(UserWarning, match=r"forward replaces Neuron\.(memory|trace), which a graph cannot"):
        amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    assert neuron._buffers["memory"] is memory
    assert vars(neuron)["trace"] is trace
    expected = model(X)
    neuron._buffers["memory"], neuron.trace = memory, trace
    torch.testing.assert_close(amp(X), expected, rtol=0.05, atol=0.05)


def test_modules_that_forward_makes_are_captured():
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(8, 8)

        def forward(self, x):
            norm = nn.Sequential(nn.BatchNorm1d(8), nn.LayerNorm(8))
            return nn.Softmax(-1)(norm(self.own(x)))

    model = Makes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)


def test_a_part_that_a_model_has_twice_is_no_module_outside():
    """torch.export calls the parts of such a model through proxies."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.gain = nn.Linear(8, 8), 2.0

        def forward(self, x):
            return self.layer(x) * self.gain

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shift = Inner(), nn.Parameter(torch.ones(8))
            self.again = nn.ModuleList([self.first])

        def forward(self, x):
            return self.again[0](self.first(x)) + self.shift

    amp = ampgraph.convert(Twice(), (X,), dtype=torch.bfloat16, capture="ahead of time")
    assert right(amp)
    amp.source.first.gain = 5.0
    assert right(amp)
    assert len(amp.graph_modules) == 2
