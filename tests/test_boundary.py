"""The gradients of a converted model: float32, unscaled, on every backend and capture."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy, StaticLossScale

from .helpers import close
from .models import ReluNet

pytestmark = pytest.mark.usefixtures("shared_captures")
SCALE = 2.0**14
FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=SCALE))
BACKENDS = ["eager", "aot_eager", "inductor"]


class ByHand(nn.Module):
    """`ReluNet` with the casts that convert makes, by hand."""

    def __init__(self, net: ReluNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def low(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, linear.weight.half(), linear.bias.half())

        return low(self.net.second, low(self.net.first, x.half()).relu()).float()


def make(model: nn.Module, *args: torch.Tensor, just_in_time: bool = False, backend="eager", policy=FLOAT16):
    example = () if just_in_time else (args,)
    return ampgraph.convert(model, *example, policy=policy, backend=backend)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def assert_close(ours: list, theirs: list, tolerance: float = 4e-3) -> None:
    """Compares up to float16 rounding, relative to each tensor's largest element."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert (one - other).abs().max() <= tolerance * other.abs().max()


def pair(model: nn.Module, *args: torch.Tensor, **given):
    """Returns the converted model and a float32 copy of its source."""
    reference = copy.deepcopy(model)
    return make(model, *args, **given), reference


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_casts_by_hand(backend, just_in_time) -> None:
    source, x = ReluNet(), torch.randn(4, 8, requires_grad=True)
    reference = ByHand(copy.deepcopy(source))
    amp = make(source, x, backend=backend, just_in_time=just_in_time)
    amp(x).square().mean().backward()
    mine, x.grad = x.grad, None

    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    optimizer = torch.optim.SGD([*reference.parameters(), x], lr=0.1)
    scaler.scale(reference(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    ours, theirs = [*gradients(amp), mine], [*gradients(reference), x.grad]
    assert all(g.dtype == torch.float32 for g in ours)
    if backend == "inductor":  # it keeps more than float16 between fused ops
        assert_close(ours, theirs)
    else:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tiny_gradients_survive(backend, just_in_time) -> None:
    x = torch.randn(4, 8)
    amp, reference = pair(ReluNet(), x, backend=backend, just_in_time=just_in_time)
    for model in (amp, reference):
        (model(x).mean() * 1e-7).backward()
    assert_close(gradients(amp), gradients(reference))
    policy = Policy(dtype=torch.float16, loss_scale=NoLossScale())
    unscaled = make(copy.deepcopy(amp.source), x, policy=policy)
    (unscaled(x).mean() * 1e-9).backward()
    assert not any(g.any() for g in gradients(unscaled))


# -- plain loops -------------------------------------------------------------------------------------


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_clipping_and_accumulation(just_in_time) -> None:
    batches = [torch.randn(4, 8) for _ in range(4)]
    amp, reference = pair(ReluNet(), batches[0], just_in_time=just_in_time)
    norms = []
    for model in (amp, reference):
        for x in batches:
            loss = model(x).square().mean()
            loss /= len(batches)
            loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    torch.testing.assert_close(*norms, rtol=4e-3, atol=0)
    assert_close(gradients(amp), gradients(reference))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b, self.unused = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x).relu()
        return {"a": self.a(h), "b": self.b(h).double(), "h": h}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_several_outputs_losses_and_an_unused_parameter(backend) -> None:
    x = torch.randn(4, 8)
    amp, reference = pair(TwoOutputs(), x, backend=backend)
    for model in (amp, reference):
        out = model(x)
        (out["a"].square().mean() + out["b"].float().sum() * 1e-4).backward(retain_graph=True)
        out["h"].mean().backward()
    assert amp.unused.weight.grad is None
    assert_close(gradients(amp), gradients(reference))
    amp.zero_grad()
    reference.zero_grad()
    for model in (amp, reference):
        model(x)["a"].mean().backward()
    if backend == "eager":
        assert_close(gradients(amp), gradients(reference))
    else:  # torch.compile gives zeros
        assert not amp.b.weight.grad.any()


def test_retain_graph_adds_up() -> None:
    x = torch.randn(4, 8)
    amp = make(ReluNet(), x)
    loss = amp(x).square().mean()
    loss.backward(retain_graph=True)
    once = [g.clone() for g in gradients(amp)]
    loss.backward()
    assert all(torch.equal(2 * a, b) for a, b in zip(once, gradients(amp), strict=True))


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_adversarial_loop(just_in_time) -> None:
    data = [torch.randn(4, 8) for _ in range(6)]
    results = []
    for convert in (True, False):
        torch.manual_seed(0)
        generator, critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), ReluNet()
        if convert:
            generator = make(generator, data[0], just_in_time=just_in_time)
            critic = make(critic, data[0], just_in_time=just_in_time)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, critic)]
        if convert:
            generator.scaler.attach(optimizers[0])
            critic.scaler.attach(optimizers[1])
        for x in data:
            optimizers[1].zero_grad()
            (critic(x).square().mean() - critic(generator(x).detach()).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(generator(x)).mean().backward()
            optimizers[0].step()
        results.append([p.detach() for m in (generator, critic) for p in m.parameters()])
        if convert:
            assert generator.scaler.last_overflow is critic.scaler.last_overflow is None
    assert_close(*results)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_frozen_parameters_get_nothing(backend, just_in_time) -> None:
    source, x = ReluNet(), torch.randn(4, 8)
    source.first.requires_grad_(False)
    amp, reference = pair(source, x, backend=backend, just_in_time=just_in_time)
    for model in (amp, reference):
        model(x).square().mean().backward()
    assert amp.first.weight.grad is None
    assert_close(gradients(amp), gradients(reference))
    amp.first.requires_grad_(True)  # thawed later
    reference.first.requires_grad_(True)
    for model in (amp, reference):
        model.zero_grad()
        model(x).square().mean().backward()
    assert_close(gradients(amp), gradients(reference))


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "jit"])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_what_no_gradient_reaches_gets_none(backend, just_in_time) -> None:
    """A zero gradient would not do: weight decay moves a parameter that has one."""

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ahead, self.inside, self.written = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.inside(x)
            result = torch.zeros_like(x)
            result[:, :4] = self.written(x)[:, :4]
            return result - target - self.ahead(x).detach()

    model, x = Distilled(), torch.randn(4, 8)
    make(model, x, backend=backend, just_in_time=just_in_time)(x).square().sum().backward()
    assert [g is None for g in gradients(model)] == [True, True, True, True, False, False]


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "jit"])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_batch_of_none(backend, just_in_time) -> None:
    x = torch.randn(0, 8, requires_grad=True)
    amp = make(ReluNet(), x, backend=backend, just_in_time=just_in_time)
    amp(x).sum().backward()
    assert x.grad.shape == (0, 8)
    assert all(not g.any() for g in gradients(amp))


def test_frozen_model_passes_gradients_on() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    amp, reference = pair(ReluNet().requires_grad_(False), x)
    found = [torch.autograd.grad(model(x).square().mean(), x)[0] for model in (amp, reference)]
    assert_close([found[0]], [found[1]])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_tied_parameters(backend, just_in_time) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    x = torch.randint(0, 11, (4, 3))
    amp, reference = pair(Tied(), x, backend=backend, just_in_time=just_in_time)
    for model in (amp, reference):
        model(x).square().mean().backward()
    assert_close(gradients(amp), gradients(reference))


def test_used_twice_in_one_step() -> None:
    x = torch.randn(4, 8)
    amp, reference = pair(ReluNet(), x)
    for model in (amp, reference):
        (model(x).mean() + model(x * 2).square().mean()).backward()
    assert_close(gradients(amp), gradients(reference))


def test_parameters_and_inputs_that_are_outputs() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.linear(x), x, self.linear.weight, x.view(-1)

    x = torch.randn(4, 8, requires_grad=True)
    amp, reference = pair(Through(), x)
    found = []
    for model in (amp, reference):
        x.grad = None
        sum(out.square().mean() for out in model(x)).backward()
        found.append([*gradients(model), x.grad])
    assert_close(*found)


def test_one_bad_input_among_several_is_reported() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, x) + nn.functional.linear(y, y)

    for bad in range(2):
        inputs = [torch.randn(4, 4) for _ in range(2)]
        inputs[bad][0, 0] = float("nan")
        for x in inputs:
            x.requires_grad_()
        amp = make(Two(), *inputs)
        amp(*inputs).nansum().backward()
        assert amp.scaler.state.flags.tolist() == [1.0]


def test_sparse_gradients_of_a_compiled_model() -> None:
    ids = torch.randint(0, 20, (4, 5))
    amp, reference = pair(nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)), ids)
    amp = make(amp.source, ids, just_in_time=True, backend="aot_eager")
    for model in (amp, reference):
        model(ids).square().mean().backward()
    table, *_ = gradients(amp)
    assert table.is_sparse
    assert len(amp.graph_modules) == 1
    assert_close([table.to_dense()], [gradients(reference)[0].to_dense()])


def test_sparse_gradients() -> None:
    source, x = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4)), torch.tensor([1, 3, 1])
    amp, reference = pair(source, x)
    for model in (amp, reference):
        model(x).square().mean().backward()
    assert source[0].weight.grad.is_sparse
    dense = [[g.to_dense() for g in gradients(model)] for model in (amp, reference)]
    assert_close(*dense)
    assert not amp.scaler.state.flags.any()
    amp(x).backward(torch.full((3, 4), float("inf")))
    assert amp.scaler.state.flags[0] > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_aliased_outputs_and_written_inputs(backend, just_in_time) -> None:
    class Aliases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x.add_(1)
            h = self.linear(x)
            return h, h.view(-1), h

    x = torch.randn(4, 8)
    amp, reference = pair(Aliases(), x.clone(), backend=backend, just_in_time=just_in_time)
    inputs = [x.clone(), x.clone()]
    for model, given in zip((amp, reference), inputs, strict=True):
        sum(out.square().mean() for out in model(given)).backward()
    assert torch.equal(*inputs)
    assert_close(gradients(amp), gradients(reference))


def test_in_place_on_an_output() -> None:
    x = torch.randn(4, 8)
    amp, reference = pair(ReluNet(), x)
    for model in (amp, reference):
        out = model(x)
        out[:, 0] = 0
        out += 1
        out.square().mean().backward()
    assert_close(gradients(amp), gradients(reference))


# -- without gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_no_boundary_without_gradients(mode, just_in_time) -> None:
    x = torch.randn(4, 8)
    amp = make(ReluNet(), x, just_in_time=just_in_time)
    amp.eval()
    with mode():
        assert not amp(x).requires_grad
    assert amp.scaler.state.flags is None
    assert "scale_gradients" not in str(amp.graph_module.graph)
    amp.train()
    amp(x).sum().backward()
    assert amp.scaler.state.flags is not None
    assert "scale_gradients" not in str(amp.graph_module.graph)
    assert "scale_gradients" in str(amp.training_graph.graph)


# -- autograd's corners ------------------------------------------------------------------------------


def test_second_derivatives() -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    x = torch.randn(4, 8, requires_grad=True)
    amp, reference = pair(Smooth(), x)
    found = []
    for model in (amp, reference):
        x.grad = None
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (grad.norm() - 1).square().backward()
        found.append([*gradients(model), x.grad])
    assert_close(*found, tolerance=2e-2)


class Force(nn.Module):
    """The gradient of an energy, inside forward; Dynamo stops there, and autograd runs in its thread."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x):
        energy = self.layers(x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore:.*captured in parts")
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_taken_inside_forward_are_scaled_once(scale):
    def gradients(model, x):
        (model(x) - 1).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    source, x = Force(), torch.randn(8, 4, requires_grad=True)
    expected = gradients(copy.deepcopy(source), x)
    policy = Policy(dtype=torch.float16, loss_scale=StaticLossScale(scale))
    amp = ampgraph.convert(source, policy=policy, backend="eager")
    for got, want in zip(gradients(amp, x), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.002)
    assert amp.graph_modules
    assert not [each for each in ampgraph.explain(amp).coverage.breaks if "ampgraph" in each.where]


def _inner(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value.sum(), x, create_graph=True)[0]


# Losses with gradients inside gradients, which read gradients in other ways than as a sum.
NESTED = {
    "third order": lambda m, x: m(x) * _inner(x, x) + _inner(_inner(_inner(m(x), x), x)[:, :1], x),
    "a product with a gradient": lambda m, x: _inner((u := m(x)) * _inner(u, x)[:, :1], x),
    "of a norm of a gradient": lambda m, x: _inner(_inner(m(x), x).square(), x),
    "at a point moved by a gradient": lambda m, x: _inner(m(x + _inner(m(x), x)), x),
    "fourth order": lambda m, x: _inner(_inner(_inner(m(x), x).square(), x).square(), x),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("scale", [16.0, 128.0])
def test_gradients_inside_gradients_are_scaled_once(name: str, scale: float) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 24).view(8, 3).requires_grad_()
        NESTED[name](model, x).square().mean().backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), x.grad]

    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    expected = gradients(copy.deepcopy(source))
    policy = Policy(dtype=torch.float16, loss_scale=StaticLossScale(scale))
    amp = ampgraph.convert(source, (torch.randn(8, 3, requires_grad=True),), policy=policy, backend="eager")
    for got, want in zip(gradients(amp), expected, strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


def test_second_derivatives_of_a_compiled_model_are_an_error() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    amp = make(nn.Sequential(nn.Linear(8, 4), nn.Tanh()), x, backend="aot_eager")
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(amp(x).square().sum(), x, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_activation_checkpointing_around_the_model(backend, reentrant) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    amp, reference = pair(ReluNet(), x, backend=backend)
    checkpoint(amp, x, use_reentrant=reentrant).square().mean().backward()
    reference(x).square().mean().backward()
    assert_close(gradients(amp), gradients(reference))


def test_activation_checkpointing_inside_the_model() -> None:
    class Checkpointed(ReluNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False))

    x = torch.randn(4, 8)
    amp, reference = pair(Checkpointed(), x, just_in_time=True)
    for model in (amp, reference):
        model(x).square().mean().backward()
    assert_close(gradients(amp), gradients(reference))


def test_no_underflow_between_sub_graphs() -> None:
    class Broken(ReluNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.second(h) * 1e-7

    x = torch.randn(4, 8)
    amp, reference = pair(Broken(), x, just_in_time=True)
    for model in (amp, reference):
        model(x).mean().backward()
    assert len(amp.graph_modules) == 2
    assert_close(gradients(amp), gradients(reference))
    assert all(g.any() for g in gradients(amp))


# -- the scale changes -------------------------------------------------------------------------------


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_new_scale_compiles_nothing(just_in_time) -> None:
    compiled = []

    def backend(graph_module, inputs, **_):
        compiled.append(graph_module)
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, inputs)

    x = torch.randn(4, 8)
    amp, reference = pair(ReluNet(), x, backend=backend, just_in_time=just_in_time)
    reference(x).square().mean().backward()
    for scale in (SCALE, 4.0, 512.0, SCALE):
        amp.scaler.update(scale)
        amp.zero_grad()
        amp(x).square().mean().backward()
        assert_close(gradients(amp), gradients(reference))
    assert len(compiled) == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_scale_may_change_before_the_backward(backend, just_in_time) -> None:
    x = torch.randn(4, 8)
    amp, reference = pair(ReluNet(), x, backend=backend, just_in_time=just_in_time)
    loss = amp(x).square().mean()
    amp.scaler.update(4.0)
    loss.backward()
    reference(x).square().mean().backward()
    assert_close(gradients(amp), gradients(reference))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_a_scale_that_is_set_in_inference_mode(backend, just_in_time) -> None:
    """Backwards save the scale, and they can save no tensor that was made in inference mode."""
    source, x = ReluNet(), torch.randn(4, 8)
    reference = copy.deepcopy(source)
    reference(x).square().mean().backward()
    with torch.inference_mode():
        amp = make(source, x, backend=backend, just_in_time=just_in_time)
    for change in (
        lambda: amp(x),
        lambda: amp.scaler.update(4.0),
        lambda: amp.scaler.load_state_dict(amp.scaler.state_dict()),
    ):
        amp.zero_grad()
        amp(x).square().mean().backward()
        assert_close(gradients(amp), gradients(reference))
        with torch.inference_mode():
            change()
    amp(x).square().mean().backward()


class Tempered(nn.Module):
    """Divides by Python floats that are an argument and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.second(self.first(x) * factor**2) / self.temperature


@pytest.mark.parametrize("backend", BACKENDS)
def test_floats_that_change_between_calls(backend) -> None:
    """Dynamo passes such a float as a 0-dim tensor, from which the graph reads the number."""
    x = torch.randn(4, 8)
    amp, reference = pair(Tempered(), x, backend=backend, just_in_time=True)
    for factor, temperature in ((0.5, 1.0), (0.7, 1.0), (0.9, 2.0), (0.3, 3.0)):
        for model in (amp.source, reference):
            model.zero_grad()
            model.temperature = temperature
        outputs = [model(x, factor) for model in (amp, reference)]
        close(*outputs)
        assert not torch.equal(*outputs)  # not the source's own float32
        for output in outputs:
            output.square().mean().backward()
        assert_close(gradients(amp), gradients(reference))
    assert len(amp.graph_modules) == 3  # with no number dynamic, one, and both


class Constrained(nn.Linear):
    """Keeps the norms of its rows below a bound, as EEGNet does."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Momentum(nn.Module):
    """Moves a second encoder after the first, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    @torch.no_grad()
    def move(self):
        for a, b in zip(self.first.parameters(), self.second.parameters(), strict=True):
            b.data = b.data * 0.5 + a.data * 0.5

    def forward(self, x):
        y = self.first(x)
        self.move()
        return y * self.second(x).detach()


class Centred(nn.Module):
    """Replaces the data of a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.fc(x)
        self.mean.data = 0.9 * self.mean + y.detach().mean(0).float()
        return y - self.mean


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "make", [lambda: Constrained(4, 4), Momentum, Centred], ids=["weight", "encoder", "buffer"]
)
def test_data_that_forward_replaces_reaches_the_parameter(make, backend):
    torch.manual_seed(0)
    source = make()
    twin, x = copy.deepcopy(source), torch.randn(8, 4)
    policy = ampgraph.Policy("O1", dtype=torch.float16, loss_scale=ampgraph.StaticLossScale(8.0))
    amp = ampgraph.convert(source, policy=policy, backend=backend)
    for model in (amp, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        if model is amp:
            amp.scaler.attach(optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    for name, value in twin.state_dict().items():
        close(source.state_dict()[name], value, 0.01)


def test_warnings_that_are_errors_do_not_stop_a_compilation():
    torch._dynamo.reset()
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp = ampgraph.convert(model, (x,), dtype=torch.float16, backend="aot_eager")
        amp(x).square().mean().backward()
        with pytest.raises(DeprecationWarning, match="should not be instantiated"):  # others still do
            type("Own", (torch.autograd.Function,), {})()
        # As Dynamo does at each guard on Python 3.13.0, from torch 2.14 on.
        warnings.warn("Guards may run slower on Python 3.13.0. Upgrade", RuntimeWarning, stacklevel=1)
    assert model.weight.grad.isfinite().all()
