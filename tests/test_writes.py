"""Memory that the source writes in place: what converting must not lose, add or make undifferentiable."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import ampgraph
from ampgraph import NoLossScale, Policy, fp16_guard
from ampgraph.training.kept_copy import kept_copy

from .helpers import Fn, close

_DRAWN = torch.Generator().manual_seed(0)  # decisions on means must not be close
X, Y, W = (torch.randn(rows, 8, generator=_DRAWN) for rows in (4, 4, 8))
LOW = torch.bfloat16


def converted(function, *args, level="O1", **children):
    policy = Policy(level=level, dtype=LOW, loss_scale=NoLossScale())
    return ampgraph.convert(Fn(function, **children), args, policy=policy)


def writes_after_widening(h, y, w):
    wide = h.float()
    wide[0].copy_(y[0])
    return wide @ w


def test_a_write_after_a_widening_is_not_undone():
    """Narrowing the written memory gives not what was widened, but what was written."""
    args = (X.to(LOW), Y, W)
    close(converted(writes_after_widening, *args)(*args), writes_after_widening(*args))


def test_a_second_run_of_the_pipeline_keeps_the_write():
    def function(x, y, w):
        low = x @ w
        low[0].copy_(y[0])
        return low @ w, low

    from ampgraph.passes.pipeline import rewrite

    amp = converted(function, X, Y.to(LOW), W)
    expected = amp(X, Y.to(LOW), W)
    rewrite(amp.graph_module, amp.policy)
    amp.graph_module.recompile()
    for got, wanted in zip(amp(X, Y.to(LOW), W), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize("dtype", [LOW, torch.float32])
@pytest.mark.parametrize(
    "repeat",
    [lambda x: x.mean(0).expand(4, 8), lambda x: x.flatten().relu().unfold(0, 8, 2)[:4]],
    ids=["expanded", "windows"],
)
def test_a_write_shows_wherever_the_memory_does(repeat, dtype, just_in_time):
    def function(x, mask):
        made = repeat(x)
        made.masked_fill_(mask, 7.0)
        return made + x @ x.t() @ x, made

    args = (X.to(dtype), torch.eye(4, 8, dtype=torch.bool))
    policy = Policy(dtype=LOW, loss_scale=NoLossScale())
    amp = ampgraph.convert(Fn(function), *(() if just_in_time else (args,)), policy=policy)
    assert torch.equal(amp(*args)[1], function(*args)[1])


@pytest.mark.parametrize("dtype", [LOW, torch.float32])
def test_an_in_place_op_keeps_the_dtype_it_writes(dtype):
    """``x.add_(wider)`` has the dtype of x, ``x + wider`` has not."""

    def function(x, wider):
        made = x.relu()
        made.add_(wider)
        return made * 2

    args = (X.to(dtype), Y.to(torch.float32 if dtype == LOW else torch.float64))
    result = converted(function, *args)(*args)
    assert result.dtype == dtype
    assert torch.equal(result, function(*args))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_returned_view_of_an_input_is_that_memory(level):
    """Also where everything outside of an fp16_guard is to be float32."""

    def function(x, low, w):
        with ampgraph.fp16_guard():
            product = x @ w
        return product, low[..., :2], x.t().chunk(2)[0]

    args = (X, Y.to(LOW), W)
    _, part, half = converted(function, *args, level=level)(*args)
    assert part.data_ptr() == args[1].data_ptr()
    assert half.data_ptr() == args[0].data_ptr()


def broadcast(other, x):
    return torch.broadcast_tensors(other, x)[1]


def broadcast_after_type_as(other, x):
    return broadcast(other, x.type_as(other))


def broadcast_under_a_guard(other, x):
    """Its memory is that of both arguments, of which one is to be float32."""
    with ampgraph.fp32_guard():
        turned = x.t()
    return torch.broadcast_tensors(x.t(), turned)[1]


VIEWS_OF_THE_SECOND = (
    broadcast,
    broadcast_after_type_as,
    broadcast_under_a_guard,
    lambda other, x: broadcast(other, broadcast(other, x)).chunk(2)[0].unbind(0)[0],
    lambda other, x: broadcast(other, x).view(torch.int16),
    lambda other, x: torch.meshgrid(other[0], x[0], indexing="ij")[1],
    lambda other, x: torch.atleast_3d([other, x])[1],
)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_returned_result_of_several_is_the_memory_of_its_argument(level):
    """Also beside a float32 op on low inputs, and beside a low op on float32 inputs."""

    layer = nn.Linear(8, 8)

    def function(x, low, w):
        narrow = x @ w
        pairs = ((low.exp(), low), (narrow, x), (narrow[0].exp().expand(8, 8), layer.weight))
        return [[view(*pair) for view in VIEWS_OF_THE_SECOND] for pair in pairs]

    args = (X, Y.to(LOW), W)
    views = converted(function, *args, level=level, layer=layer)(*args)
    for of, memory in zip(views, (args[1], args[0], layer.weight), strict=True):
        assert all(view.data_ptr() == memory.data_ptr() for view in of)


def overwrite(x, other):
    return torch.empty_like(x).copy_(x).mul(other)


def draw(x, other):
    return x.mul(2).uniform_() * other


def zero(x, other):
    return x.mul(2).zero_() * other


@pytest.mark.parametrize("function", [overwrite, draw, zero])
def test_in_place_ops_stay_differentiable(function):
    """Functional forms of these have no derivative; a gradient of zeros is not the same as none."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    policy = Policy(dtype=LOW, loss_scale=NoLossScale())
    model = nn.Sequential(first, Two(function, second))
    ampgraph.convert(model, (X,), policy=policy)(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Two(nn.Module):
    def __init__(self, function, layer):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return self.function(x, self.layer(x))


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_written_without_gradients_keeps_those_it_had(backend, just_in_time):
    """As a functional op the write would cut the graph, and the weight would get no gradient."""

    def function(x, y):
        made = layer(x)
        with torch.no_grad():
            made.mul_(2)
            made.add_(y)
        return made.relu()

    layer = nn.Linear(8, 8)
    model = Fn(function, layer=layer)
    policy = Policy(dtype=torch.float16)
    amp = ampgraph.convert(model, None if just_in_time else (X, Y), policy=policy, backend=backend)

    def gradients(module):
        layer.zero_grad()
        (module(X, Y).mean() * 1e-7).backward()  # float16 holds it scaled
        return [p.grad * 1e7 for p in layer.parameters()]

    for got, wanted in zip(gradients(amp), gradients(model), strict=True):
        close(got, wanted)


def cast_to_its_own_dtype(weight):
    """As Hugging Face's SwitchTransformers casts its router."""
    return weight.to(torch.float32)


def not_dropped(weight):
    return nn.functional.dropout(weight, 0.5, training=False)


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize(
    ("passed_on", "backend"),
    [
        (cast_to_its_own_dtype, "eager"),
        (cast_to_its_own_dtype, "aot_eager"),
        (torch.Tensor.contiguous, "eager"),
        (torch.Tensor.contiguous, "aot_eager"),
        (not_dropped, "eager"),  # AOTAutograd cuts it off, in float32 too
    ],
)
def test_gradients_of_what_is_handed_on_without_gradients_are_unscaled(passed_on, backend, just_in_time):
    """These return the weight itself, so that it has gradients all the same."""

    def function(x, y):
        with torch.no_grad():
            weight = passed_on(layer.weight)
        return nn.functional.linear(x, weight) * y

    layer = nn.Linear(8, 8, bias=False)
    model = Fn(function, layer=layer)
    policy = Policy(dtype=torch.float16)
    amp = ampgraph.convert(model, None if just_in_time else (X, Y), policy=policy, backend=backend)

    def gradient(module):
        layer.zero_grad()
        module(X, Y).mean().backward()
        return layer.weight.grad

    close(gradient(amp), gradient(model))


def test_what_was_copied_before_a_write_is_read_from_the_copy():
    """The copy is float32 and its reader low: reading the low original would read what was written since."""

    def function(low, w):
        wide = low.float()
        low.sub_(1)
        return wide @ w

    amp = converted(function, X.to(LOW), W)
    close(amp(X.to(LOW), W), function(X.to(LOW), W))


def test_a_read_copy_outlives_a_write_until_the_backward():
    def function(low, w):
        product = low.float() @ w
        low.sub_(1)
        return product

    weight = W.clone().requires_grad_()
    converted(function, X.to(LOW), weight)(X.to(LOW), weight).sum().backward()
    close(weight.grad, X.to(LOW).float().sum(0)[:, None].expand(8, 8))


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize("written", [0, 1])
def test_a_cast_that_the_plan_makes_idle_still_copies(written, just_in_time):
    """In the source a float32 tensor and its low copy; converted both are low, and must stay two."""

    def function(x):
        made = layer(x)
        low = made.to(LOW)
        (made, low)[written][0].zero_()
        return made, low

    layer = nn.Linear(8, 8)
    model = Fn(function, layer=layer)
    amp = ampgraph.convert(model, None if just_in_time else (X,), policy=Policy(dtype=LOW))
    for got, wanted in zip(amp(X), model(X), strict=True):
        close(got, wanted)


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize("dtype", [LOW, torch.float32])
@pytest.mark.parametrize("written", ["source", "result"])
def test_what_takes_another_tensors_dtype_is_the_memory_it_is_in_the_source(written, dtype, just_in_time):
    """The plan turns around the dtype of the other tensor: float32 code runs low, low code in float32."""

    def function(x, w):
        made = x.relu()
        with ampgraph.fp32_guard() if dtype == LOW else ampgraph.fp16_guard():
            other = made @ w
        same = made.type_as(other)
        (made if written == "source" else same)[0].copy_(other[1])
        return made, same, same * 1

    args = (X.to(dtype), W.to(dtype))
    policy = Policy(dtype=LOW, loss_scale=NoLossScale())
    amp = ampgraph.convert(Fn(function), *(() if just_in_time else (args,)), policy=policy)
    for got, wanted in zip(amp(*args), function(*args), strict=True):
        close(got, wanted)


@pytest.mark.parametrize("dtype", [LOW, torch.float32])
def test_a_result_in_another_tensors_dtype_may_be_written(dtype):
    def function(x, w):
        other = (x.to(dtype) @ w.to(dtype)).exp()
        made = x.relu().type_as(other)
        made[0].copy_(other[1])
        return made, made * 1

    args = (X.to(LOW if dtype == torch.float32 else torch.float32), W)
    for got, wanted in zip(converted(function, *args)(*args), function(*args), strict=True):
        close(got, wanted)


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead of time", "just in time"])
def test_as_strided_reads_past_the_view_it_is_given(just_in_time):
    def function(x):
        made = layer(x)
        part = made[:, ::2]
        with fp16_guard():
            strided = part.as_strided((2, 8), (16, 1))
        return strided * 2

    layer = nn.Linear(8, 8)
    model = Fn(function, layer=layer)
    amp = ampgraph.convert(model, None if just_in_time else (X,), policy=Policy(dtype=LOW))
    close(amp(X), model(X))


class Reads(nn.Module):
    """Reads a buffer, and writes it in one of several ways."""

    def __init__(self, read, write, reads_first):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("m", torch.ones(8))
        self.read, self.write, self.reads_first = read, write, reads_first

    def forward(self, x):
        y = self.fc(x)
        if self.reads_first:
            y = self.read(y, self.m)
        self.write(self, y)
        return y if self.reads_first else self.read(y, self.m)


def _assigned(model, y):
    model.m = 0.9 * model.m + y.detach().mean(0)


def _in_place(model, y):
    model.m.mul_(2).add_(y.detach().mean(0))


def _copied(model, y):
    with torch.no_grad():
        model.m.copy_(0.9 * model.m + y.mean(0))


READS = {
    "a sum": lambda y, m: y / (m + 4.0),
    "itself": lambda y, m: y * m,
    "a view": lambda y, m: y * m[None].tanh(),
    "a decision": lambda y, m: torch.where(m > 1.5, y, -y),
}
WRITES = {"assigned": _assigned, "in place": _in_place, "copied": _copied}


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("reads_first", [True, False], ids=["reads first", "writes first"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_gradients_of_what_is_read_and_written(write, read, reads_first, level, backend):
    source = Reads(READS[read], WRITES[write], reads_first)
    is_error = write != "assigned" and reads_first and read in ("itself", "a view") and backend == "eager"
    if is_error:
        pytest.skip("autograd refuses it in the source, too")
    twin = copy.deepcopy(source)
    if write != "assigned" and reads_first:
        twin.read = lambda y, m: source.read(y, m.clone())  # what autograd allows
    amp = ampgraph.convert(source, (X,), policy=level, dtype=LOW, backend=backend)
    for _ in range(3):
        amp.zero_grad()
        twin.zero_grad()
        actual, expected = amp(X), twin(X)
        actual.square().sum().backward()
        expected.square().sum().backward()
        close(actual, expected)
        close(source.fc.weight.grad, twin.fc.weight.grad)
        close(source.m, twin.m)


class Counts(nn.Module):
    """Counts its calls in a buffer, and returns the buffer from before the call."""

    def __init__(self, kept):
        super().__init__()
        self.fc, self.kept = nn.Linear(8, 8), kept
        self.register_buffer("m", torch.ones(8))

    def forward(self, x):
        old = self.m
        self.m = self.m + 1
        kinds = {"itself": old, "a view": old[2:], "in a list": [old, self.m]}
        return self.fc(x), kinds[self.kept]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kept", ["itself", "a view", "in a list"])
def test_what_a_buffer_was_before_an_assignment_is_an_output(kept, level, backend):
    source = Counts(kept)
    twin = copy.deepcopy(source)
    amp = ampgraph.convert(source, (X,), policy=level, dtype=LOW, backend=backend)
    for _ in range(3):
        (_, actual), (_, expected) = amp(X), twin(X)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        torch.testing.assert_close(source.m, twin.m, rtol=0, atol=0)


LAYOUTS = {
    "apart": lambda t: (t[:4], t[4:8]),
    "the same": lambda t: (t[:4], t[:4].view(4, 8)),
    "overlapping": lambda t: (t[:4], t[1:5]),
    "none": lambda t: (t[:4].clone(), t[4:8].clone()),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_each_way_of_sharing_memory_has_its_graph(first, second, backend):
    fc = nn.Linear(8, 8)

    def function(a, b):
        a.add_(1)
        return fc(b), a * 1

    amp = ampgraph.convert(
        Fn(function, fc=fc), (X.clone(), X.clone()), policy="O2", dtype=LOW, backend=backend
    )
    for layout in (first, second):
        mine, other = torch.ones(8, 8), torch.ones(8, 8)
        for actual, expected in zip(
            amp(*LAYOUTS[layout](mine)), function(*LAYOUTS[layout](other)), strict=True
        ):
            close(actual, expected)
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_an_exported_program_returns_what_a_buffer_was(tmp_path):
    program = ampgraph.export(Counts("itself"), X, policy="O2", dtype=LOW)
    torch.export.save(program, tmp_path / "counts.pt2")
    module = torch.export.load(tmp_path / "counts.pt2").module()
    assert [module(X)[1].unique().tolist() for _ in range(3)] == [[1.0], [2.0], [3.0]]


class Assigns(nn.Module):
    """Assigns buffers in one of several ways."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.register_buffer("a", torch.ones(8))
        self.register_buffer("b", torch.ones(3, 8))

    def forward(self, y):
        return self.step(self, y, y.detach().mean(0))


def _adds_and_assigns(m, y, mean):
    m.a += mean
    return y * m.a


def _view_of_another(m, y, mean):
    m.a = m.b[0]
    m.b = m.b * 0.9 + mean
    return y * m.a


def _exchanges(m, y, mean):
    m.a, m.b = m.b[0] + mean, m.a.expand(3, 8) * 2
    return y + m.a + m.b.sum(0)


def _both_the_same(m, y, mean):
    old = m.a
    m.a = old + mean
    m.b = m.a.expand(3, 8)
    return y * old, old


def _twice(m, y, mean):
    first = m.a
    m.a = first + mean
    second = m.a
    m.a = second * 2
    return y * second, first, second, m.a


ASSIGNMENTS = [_adds_and_assigns, _view_of_another, _exchanges, _both_the_same, _twice]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("is_inside", [False, True], ids=["the model", "a module inside"])
@pytest.mark.parametrize("step", ASSIGNMENTS)
def test_assigned_buffers(step, is_inside, level, backend):
    torch.manual_seed(0)
    fc = nn.Linear(8, 8)
    alone = Assigns(lambda m, y, mean: step(m, y * 1.5, mean))
    source = nn.Sequential(fc, Assigns(step)) if is_inside else alone
    twin = copy.deepcopy(source)
    amp = ampgraph.convert(source, (X,), policy=level, dtype=LOW, backend=backend)
    assert not amp.is_just_in_time
    for _ in range(3):
        inputs = [X.clone().requires_grad_() for _ in range(2)]
        for model, x in zip((amp, twin), inputs, strict=True):
            result = model(x)
            (result[0] if isinstance(result, tuple) else result).sum().backward()
        for actual, expected in zip(tree_leaves(amp(X)), tree_leaves(twin(X)), strict=True):
            close(actual, expected)
        close(inputs[0].grad, inputs[1].grad)
        for actual, expected in zip(source.buffers(), twin.buffers(), strict=True):
            close(actual, expected, 0.01)


class Centred(nn.Module):
    """The teacher of DINO, whose centre is assigned without gradients: both networks read the input."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("center", torch.zeros(1, 8))

    def forward(self, x):
        told = self.student(x)
        with torch.no_grad():
            known = self.teacher(x)
            target = (known - self.center).softmax(-1)
            self.center = self.center * 0.9 + known.mean(0, keepdim=True) * 0.1
        return -(target * told.log_softmax(-1)).sum(-1).mean()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_copy_of_an_assigned_buffer_comes_after_the_inputs(level):
    source = Centred()
    twin = copy.deepcopy(source)
    amp = ampgraph.convert(source, (X,), policy=level, dtype=LOW, capture="ahead of time")
    for _ in range(3):
        close(amp(X), twin(X))
        close(source.center, twin.center, 0.01)


def _moves_by_assignment(m, y):
    m.mean = 0.999 * m.mean + 0.001 * y


def _moves_by_copy(m, y):
    m.mean.copy_(0.999 * m.mean + 0.001 * y)


def _moves_a_slice(m, y):
    m.mean[:] = m.mean + 0.001 * (y - m.mean)


def _moves_in_place(m, y):
    m.mean.lerp_(y.float(), 0.001)


class Moves(nn.Module):
    """Keeps a running mean."""

    def __init__(self, move):
        super().__init__()
        self.fc, self.move = nn.Linear(8, 8), move
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.fc(x)
        self.move(self, y.detach().mean(0))
        return y - self.mean


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("move", [_moves_by_assignment, _moves_by_copy, _moves_a_slice, _moves_in_place])
def test_a_state_that_moves_slowly_moves(move, level, just_in_time, backend):
    torch.manual_seed(0)
    source = Moves(move).eval()
    twin = copy.deepcopy(source)
    args = None if just_in_time else (X,)
    amp = ampgraph.convert(source, args, policy=level, dtype=LOW, backend=backend)
    with torch.no_grad():
        for _ in range(100):
            amp(X)
            twin(X)
    close(source.mean, twin.mean, 0.01)


class Codebook(nn.Module):
    """Keeps a mean of inputs in each class: the quotient of two other states, as VQ-VAE-2 does."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("code", torch.randn(8, 16))
        self.register_buffer("size", torch.ones(16))
        self.register_buffer("total", self.code.clone())

    def smoothed(self):
        n = self.size.sum()
        return self.total / ((self.size + 1e-5) / (n + 16 * 1e-5) * n)

    def forward(self, x):
        y = self.fc(x)
        one_hot = nn.functional.one_hot((y @ self.code).argmax(1), 16).type(y.dtype)
        with torch.no_grad():
            self.size.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.total.mul_(0.9).add_(y.t() @ one_hot, alpha=0.1)
            self.code.copy_(self.smoothed())
        return y


@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_state_of_other_states_is_exact(level, just_in_time):
    source = Codebook()
    amp = ampgraph.convert(source, None if just_in_time else (X,), policy=level, dtype=LOW, backend="eager")
    for _ in range(3):
        amp(X)
        torch.testing.assert_close(source.code, source.smoothed(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("write", ["before", "after"])
def test_a_cast_of_memory_that_is_written_copies(write, level):
    """The cast makes a new tensor in the source; where the plan has one dtype, it would return its input."""

    class Casts(nn.Module):
        def forward(self, x, w):
            h = x * 2
            y = h.type_as(w.to(LOW).exp())
            (h if write == "before" else y)[0] = 7.0
            return y + 0, h.sum()

    model, inputs = Casts(), (torch.randn(4, 4), torch.randn(4, 4))
    amp = ampgraph.convert(model, inputs, policy=level, dtype=LOW)
    for actual, expected in zip(amp(*inputs), model(*inputs), strict=True):
        assert actual.dtype == expected.dtype
        close(actual, expected, 0.02)


class Rewrites(nn.Module):
    """Reads a buffer before and after a write; both reads matter to the gradient."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        y = x * 2
        before = (y * self.scale).sum()
        self.scale[0] = 3.0
        return before + (y.square() * self.scale).sum()


def test_reads_before_and_after_a_write_have_a_copy_each():
    x = X.clone().requires_grad_()
    amp = ampgraph.convert(Rewrites(), (x,), dtype=LOW, backend="aot_eager")
    assert sum(node.target is kept_copy for node in amp.training_graph.graph.nodes) == 2
    amp(x).backward()
    torch.testing.assert_close(x.grad, 2 + 8 * X * torch.tensor([3.0, *[1.0] * 7]))
