"""What a capture cannot carry is said, and never silently wrong."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph._compat import AppliedFunction

from .cases import every_pair
from .helpers import dtype_of

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Signed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return StraightThrough.apply(self.linear(x))


def test_custom_backward_ahead_of_time_is_right_or_refused():
    model, patched = Signed(), [vars(AppliedFunction), vars(torch.Tensor)]
    before = [dict(names) for names in patched]
    lost = r"Signed: .* loses the backward of StraightThrough \(Signed, .*test_lost_in_capture\.py:\d+\)"
    with pytest.warns(UserWarning, match=lost):
        amp = ampgraph.convert(model, (X,), capture="ahead of time")
    assert [dict(names) for names in patched] == before
    with torch.no_grad():
        torch.testing.assert_close(amp(X), model(X))
    with pytest.raises(ampgraph.CaptureError, match=lost):
        amp(X)
    model.requires_grad_(False)
    amp(X)
    with pytest.raises(ampgraph.CaptureError, match=lost):
        amp(X.clone().requires_grad_())
    with pytest.raises(ampgraph.CaptureError, match=lost):
        torch.func.grad(lambda x: amp(x).sum())(X)


def test_a_program_has_the_forward_alone_and_says_so():
    with pytest.warns(UserWarning, match="without the backward of StraightThrough"):
        ampgraph.export(Signed(), (X,))


straight_through = StraightThrough.apply


class Two(nn.Module):
    """Two layers; ``between`` says what goes on between them."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x):
        return self.b(self.between(self.a, x))


class Scaled(torch.autograd.Function):
    """Arguments that are no tensors, and a backward that cannot be differentiated."""

    @staticmethod
    def forward(ctx, x, factor, names):
        ctx.factor = factor + len(names)
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.factor, None, None


class ScaledInTwo(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 5 * grad


def tensor_hook(layer, x):
    x = layer(x)
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 5)
    return x.sin()


def parameter_hook(layer, x):
    if layer.weight.requires_grad:
        layer.weight.register_hook(lambda grad: grad * 5)
    return layer(x)


def node_hook(layer, x):
    x = layer(x)
    if x.grad_fn is not None:
        x.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else 5 * g for g in inputs))
    return x


def saved_hooks(layer, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 3, lambda saved: saved):
        return layer(x).sin()


def in_a_checkpoint(layer, x):
    return checkpoint(lambda x: Scaled.apply(layer(x), 3, "ab"), x, use_reentrant=False)


LOSING = {
    "bound apply": lambda layer, x: straight_through(layer(x)),
    "once differentiable": lambda layer, x: Scaled.apply(layer(x), 3, "ab"),
    "setup_context": lambda layer, x: ScaledInTwo.apply(layer(x)),
    "several": lambda layer, x: ScaledInTwo.apply(Scaled.apply(layer(x), 1, ())),
    "in a checkpoint": in_a_checkpoint,
    "hook on a tensor": tensor_hook,
    "hook on a parameter": parameter_hook,
    "hook on a node": node_hook,
    "saved tensors": saved_hooks,
}


def same_gradients(model, amp, rel=0.03):
    """Both train alike, up to a low dtype."""
    reference = copy.deepcopy(model)
    for _ in range(2):
        amp(X).square().sum().backward()
        reference(X).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.linalg.norm(p.grad - q.grad) <= rel * q.grad.norm(), name


@pytest.mark.parametrize("how", ["auto", "just in time"])
@pytest.mark.parametrize("name", LOSING)
def test_what_would_lose_gradients_trains_right(name, how, recwarn):
    torch.manual_seed(0)
    model = Two(LOSING[name])
    amp = ampgraph.convert(model, (X,), capture=how, dtype=torch.bfloat16)
    same_gradients(model, amp)
    told = [str(w.message) for w in recwarn if "gradients would be wrong" in str(w.message)]
    assert len(told) == (how == "auto")
    assert all("just in time instead" in text and f"{__file__}:" in text for text in told)


def test_backward_hooks_of_modules_keep_their_effect():
    model = Two(lambda layer, x: layer(layer(x)))
    model.b.register_full_backward_hook(lambda module, inputs, outputs: tuple(5 * g for g in inputs))
    with pytest.warns(UserWarning, match="the backward hooks of module 'b'"):
        amp = ampgraph.convert(model, (X,))
    same_gradients(model, amp)


@pytest.mark.parametrize(
    "between",
    [
        lambda layer, x: layer(x) + (layer(x).clamp(-1, 1) - layer(x)).detach(),
        lambda layer, x: checkpoint(lambda x: layer(x).sin(), x, use_reentrant=False),
        lambda layer, x: layer(x) if layer(x).grad_fn is not None else x,
    ],
    ids=["detach", "checkpoint", "grad_fn is read"],
)
def test_what_loses_nothing_is_captured_ahead_of_time(between, recwarn):
    model = Two(between)
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    same_gradients(model, amp)
    assert not amp.options.just_in_time
    assert not [w for w in recwarn if "gradients" in str(w.message)]


def test_saving_on_the_cpu_loses_nothing():
    class Offloaded(Two):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    amp = ampgraph.convert(Offloaded(lambda layer, x: layer(x).sin()), (X,), dtype=torch.bfloat16)
    same_gradients(amp.source, amp)
    assert not amp.options.just_in_time


def test_inference_stays_ahead_of_time_until_gradients_are_wanted():
    model = Signed()
    with torch.no_grad():
        amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
        amp(X)
    assert not amp.options.just_in_time
    with pytest.warns(UserWarning, match="just in time instead"):
        amp(X).sum().backward()
    assert torch.equal(model.linear.bias.grad, torch.full((8,), 3.0))


def test_blocks_that_would_lose_gradients_train_right():
    torch.manual_seed(0)
    model = nn.Sequential(Two(LOSING["once differentiable"]), Two(lambda layer, x: layer(x)))
    reference = copy.deepcopy(model)
    blocks = ampgraph.convert_blocks(model, Two, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="loses the backward of Scaled"):
        model(X).square().sum().backward()
    reference(X).square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.linalg.norm(p.grad - q.grad) < 0.03 * q.grad.norm()
    assert [block.options.just_in_time for block in blocks.values()] == [True, False]


class ProductAndSum(torch.autograd.Function):
    """Its backward is twice the true one, so that nobody can mistake one for the other."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, product, total):
        x, y = ctx.saved_tensors
        return 2 * (product * y + total), 2 * (product * x + total)


class Customs(nn.Module):
    """Two custom functions; tuples, a closed region and unread results between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm, self.c = (
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 4),
        )

    def forward(self, x):
        h = self.a(x).relu()
        left, right = h.chunk(2, -1)
        y = self.norm(self.b(h + StraightThrough.apply(h) * 0.1))
        product, total = ProductAndSum.apply(y, left)
        right = right + right[: (x.shape[0] + 1) // 2].mean()
        with torch.no_grad():
            size = y.abs().amax()
        return {"out": self.c(product + total + right) / (size + 1), "y": y}


def losses_and_gradients(model, x):
    out = model(x)
    (out["out"].square().mean() + out["y"].square().mean()).backward()
    return {n: p.grad for n, p in model.named_parameters()}, out


@pytest.mark.parametrize(
    ("backend", "level", "dtype"),
    every_pair(("eager", "aot_eager"), ("O1", "O2"), (torch.float16, torch.bfloat16)),
)
def test_just_in_time_converts_around_custom_functions(backend, level, dtype, recwarn):
    torch.manual_seed(0)
    model = Customs()
    amp = ampgraph.convert(copy.deepcopy(model), policy=level, dtype=dtype, backend=backend)
    for size in (3, 5, 7):  # from the second on with a dynamic size
        x = torch.randn(size, 8)
        model.zero_grad()
        amp.zero_grad()
        expected, source = losses_and_gradients(model, x)
        found, out = losses_and_gradients(amp, x)
        for name, value in source.items():
            assert out[name].dtype == torch.float32
            assert torch.linalg.norm(out[name] - value) < 4 * torch.finfo(dtype).eps * value.norm()
        for name, grad in expected.items():
            assert torch.linalg.norm(found[name] - grad) < 8 * torch.finfo(dtype).eps * grad.norm(), name
    assert len(amp.graph_modules) == 6  # before, between and after, for one size and for any
    assert {dtype_of(g, "linear")[0] for g in amp.graph_modules} == {dtype}
    assert not [str(w.message) for w in recwarn if "unconverted" in str(w.message)]


def test_a_backend_takes_custom_functions_as_well():
    torch.manual_seed(0)
    model, x = Customs(), torch.randn(3, 8)
    expected = model(x)
    out = torch.compile(model, backend="ampgraph", options={"dtype": torch.bfloat16})(x)
    for name, value in expected.items():
        assert 0 < torch.linalg.norm(out[name] - value) < 0.03 * value.norm()


def test_a_custom_function_within_a_region_stays_as_it_is():
    class InRegion(Signed):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = StraightThrough.apply(self.linear(x))
            return self.linear(x.float())

    model = InRegion()
    amp = ampgraph.convert(model, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"custom autograd\.Function"):
        out = amp(X)
    assert torch.equal(out, model(X))


def test_nothing_captured_is_reported_once(recwarn):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 2)

        @torch.compiler.disable
        def forward(self, x):
            return self.head(x)

    amp = ampgraph.convert(Tagger())
    with pytest.raises(ampgraph.AmpGraphError, match="call the converted model once"):
        ampgraph.explain(amp)
    amp(X)
    amp(X)
    assert sum("ran unconverted" in str(w.message) for w in recwarn) == 1
    with pytest.raises(ampgraph.AmpGraphError, match="Tagger has no graph: its calls ran unconverted"):
        ampgraph.explain(amp)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients_reach_the_table(level):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, i):
            return self.head(self.table(i).mean(1))

    model = Bag()
    ids = torch.randint(0, 20, (4, 5))
    ampgraph.convert(model, (ids,), policy=level, dtype=torch.bfloat16)(ids).sum().backward()
    assert model.table.weight.grad.layout == torch.sparse_coo


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_norm_of_constant_rows_has_finite_gradients(eps):
    """1/sqrt(1e-12) is no float16 number: the norm keeps its statistics, not itself, in float32."""
    norm = nn.LayerNorm(8, eps=eps)

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Linear(8, 8), norm

        def forward(self, x):
            return self.norm(self.a(x) * 0)

    policy = ampgraph.Policy(loss_scale=ampgraph.StaticLossScale(8.0))
    amp = ampgraph.convert(Padded(), (X,), policy=policy, dtype=torch.float16)
    ampgraph.testing.assert_dtype(amp, "layer_norm", torch.float16)
    amp(X).sum().backward()
    assert norm.weight.grad.isfinite().all()


def test_norm_without_weight_stays_float32_where_its_statistics_do_not_fit():
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12, elementwise_affine=False), nn.Linear(8, 8)
    )
    amp = ampgraph.convert(model, (X,), dtype=torch.float16)
    ampgraph.testing.assert_dtype(amp, "layer_norm", torch.float32)


def test_grad_mode_of_the_caller_survives_a_region():
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                gate = self.a(x)
            return self.b(x) * gate

    amp = ampgraph.convert(Region(), (X,))
    with torch.no_grad():
        assert not amp(X).requires_grad
    assert amp(X).requires_grad


@pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])
def test_inference_mode_inside_gives_no_gradients(args):
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.inference_mode():
                target = self.teacher(x)
            return self.student(x) - target.clone()

    model = Distilled()
    amp = ampgraph.convert(model, args)
    with torch.no_grad():
        assert not amp(X).requires_grad
        assert not torch.is_grad_enabled()
    amp(X).square().sum().backward()
    assert torch.is_grad_enabled()
    assert model.teacher.weight.grad is None
    assert model.student.weight.grad is not None


def test_reentrant_checkpoints_inside_keep_their_gradients():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=True))

    model, x = Checkpointed(), X.clone().requires_grad_()
    ampgraph.convert(model, (x,))(x).sum().backward()
    assert all(p.grad is not None for p in (x, *model.parameters()))


@pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])
def test_data_is_captured_as_detach(args):
    class Rounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            self.a.weight.data.clamp_(-0.125, 0.125)
            x = self.a(x)
            return x + (x.round() - x).data

    model = Rounded()
    amp = ampgraph.convert(model, args)
    assert torch.equal(amp(X).round(), amp(X))
    assert float(model.a.weight.abs().max()) <= 0.125
    amp(X).sum().backward()
    torch.testing.assert_close(model.a.bias.grad, torch.full((8,), 3.0))


def test_layers_dropped_at_random_train_just_in_time():
    class LayerDrop(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            return x if torch.rand([]) < 0.5 else self.second(x)

    model = LayerDrop()
    amp = ampgraph.convert(model)
    for _ in range(12):
        amp(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    low = [dtype for graph in amp.graph_modules for dtype in dtype_of(graph, "linear")]
    assert low
    assert set(low) == {amp.policy.dtype}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


class OfOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return result * grad


@pytest.mark.filterwarnings("ignore:.*captured in parts")
@pytest.mark.parametrize("function", [Cube, Reversed, OfOutput])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_second_derivatives_through_custom_functions_just_in_time(function, level):
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
            self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            energy = self.second(function.apply(self.first(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    def gradients(model):
        model(torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if not name.endswith("second.2.bias")}

    torch.manual_seed(0)
    model = Force()
    expected = gradients(copy.deepcopy(model))
    policy = ampgraph.Policy(level, dtype=torch.bfloat16)
    found = gradients(ampgraph.convert(model, policy=policy, capture="just in time", backend="eager"))
    for name, want in expected.items():
        assert (found[name] - want).norm() <= 0.05 * want.norm()


class Bytes(nn.Module):
    """``torch.where`` takes a condition of bytes; fake tensors refuse it."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        y = self.fc(x)
        return torch.where((y > 0).byte(), y, torch.zeros(()))


@pytest.mark.filterwarnings("ignore:where received a uint8")
@pytest.mark.parametrize("args", [(X,), None])
def test_a_model_that_torch_compile_refuses_runs_unconverted(args):
    source = Bytes()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*it is captured just in time instead")
        amp = ampgraph.convert(source, args, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="Bytes runs unconverted.*torch.compile fails on it with .*Error"):
        amp(X).sum().backward()
    assert source.calls == 1
    assert all(p.grad is not None for p in source.parameters())
    with warnings.catch_warnings(action="error"):
        torch.testing.assert_close(amp(X), source(X), rtol=0, atol=0)


class Tagger(nn.Module):
    """Looks at its mask before, as pytorch-crf does, and may normalize or drop."""

    def __init__(self, between):
        super().__init__()
        self.fc, self.between = nn.Linear(8, 8), between

    def forward(self, x, mask, looks=True):
        y = self.between(self.fc(x))
        if looks and not mask[0].all():
            raise ValueError("the first step must be on")
        return torch.where(mask.unsqueeze(-1), y, -y)


MASK = torch.ones(len(X), 1, dtype=torch.uint8)


@pytest.mark.filterwarnings("ignore:where received a uint8")
@pytest.mark.filterwarnings("ignore:Tagger is captured in parts")
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_part_that_torch_compile_refuses_makes_the_model_run_unconverted(looks, is_later):
    source = Tagger(nn.Identity())
    amp = ampgraph.convert(source, dtype=torch.bfloat16)
    if is_later:
        amp(X, MASK.bool(), looks)
    with pytest.warns(UserWarning, match="Tagger runs unconverted.*torch.compile fails on it with .*Error"):
        result = amp(X, MASK, looks)
    torch.testing.assert_close(result, source(X, MASK), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:where received a uint8")
@pytest.mark.parametrize("between", [nn.BatchNorm1d(8), nn.Dropout()])
def test_a_graph_that_writes_or_draws_does_not_run_twice(between):
    amp = ampgraph.convert(Tagger(between), dtype=torch.bfloat16)
    with pytest.raises(Exception, match="fake tensor call"):
        amp(X, MASK)


class Hidden(nn.Module):
    """Uses layers and parameters that no module has registered."""

    def __init__(self):
        super().__init__()
        self.fc, self.more = nn.Linear(8, 8), [nn.Linear(8, 8)]
        self.__dict__["scale"] = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.more[0](self.fc(x)) * self.scale


def test_gradients_of_parameters_that_no_module_has():
    source = Hidden()
    with pytest.raises(ampgraph.CaptureError, match=r"loses the gradient of a tensor of the size \(8, 8\)"):
        ampgraph.convert(source, (X,), dtype=torch.bfloat16, capture="ahead of time")(X)
    with pytest.warns(UserWarning, match="captured just in time instead"):
        amp = ampgraph.convert(source, (X,), dtype=torch.bfloat16)
    for call in (source, amp):
        call(X).square().mean().backward()
    with torch.no_grad():  # there a graph is right
        ampgraph.convert(source, (X,), dtype=torch.bfloat16, capture="ahead of time")(X)
    parameters = [*source.parameters(), *source.more[0].parameters(), source.scale]
    before = [p.grad / 2 for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    source(X).square().mean().backward()
    for parameter, half in zip(parameters, before, strict=True):
        torch.testing.assert_close(half, parameter.grad, rtol=0.05, atol=0.02)


def test_views_that_require_gradients_are_inputs():
    """``torch.export`` looks at what they are views of; layers return such views, and FSDP2 makes some."""
    block, y = nn.Linear(8, 8), torch.randn(8, 3, requires_grad=True)
    amp = ampgraph.convert(block, (y.t(),), dtype=torch.bfloat16, capture="ahead of time")
    amp(y.t()).sum().backward()
    assert y.grad is not None


SCALED = ampgraph.Policy(dtype=torch.float16, loss_scale=ampgraph.StaticLossScale(64.0))


class ReadsBase(nn.Module):
    """Reads a tensor of which its input is a view."""

    def __init__(self, base):
        super().__init__()
        self.fc, self.held = nn.Linear(8, 8), [base]

    def forward(self, x):
        return self.fc(x).sum() * self.held[0].sum()


class WritesOutside(ReadsBase):
    """Writes a tensor outside of the model into a result."""

    def forward(self, x):
        y = self.fc(x).clone()
        y[:, 0] = self.held[0][0, 0]
        y[0] = self.held[0][:, 0]
        return y.sum()


@pytest.mark.parametrize("model", [ReadsBase, WritesOutside])
def test_gradients_of_what_inputs_are_views_of(model):
    base = torch.randn(8, 3, requires_grad=True)
    x = base.t() if model is ReadsBase else torch.randn(3, 8)
    source = model(base)
    with pytest.warns(UserWarning, match=r"loses the gradient of a tensor .*captured just in time instead"):
        amp = ampgraph.convert(source, (x,), policy=SCALED)
    found = []
    for call in (source, amp):
        base.grad = None
        call(x).backward(retain_graph=True)
        found.append(base.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)


class AttrDict(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("args", [(X,), None])
def test_settings_whose_class_answers_for_every_name(args):
    """``__getattr__`` raises a KeyError; a capture asks for no name."""

    class Configured(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.config = AttrDict(function=torch.relu, inner=AttrDict(scale=3.0, other=object()))

        def forward(self, x):
            return self.config["function"](self.fc(x)) * self.config["inner"]["scale"]

    model = Configured()
    amp = ampgraph.convert(model, args, dtype=torch.bfloat16)
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)
    model.config["inner"]["scale"] = 5.0
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)


TABLES = {}


def test_an_interrupt_leaves_no_tensor_of_the_capture():
    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            TABLES["ones"] = torch.ones(8)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ampgraph.convert(Interrupted(), (X,), dtype=torch.bfloat16)
    assert not TABLES
