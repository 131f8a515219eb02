"""What goes in and what comes out: inputs, outputs, writes, regions, both capture ways, and clear errors."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph import AmpGraphError, CaptureError, NoLossScale, PassError, Policy, PolicyError
from ampgraph._compat import VERSION
from ampgraph.capture import capture_program

from .helpers import Fn, close, dtype_of, inserted, nodes_of

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CAPTURES = pytest.mark.parametrize("how", ["ahead of time", "just in time"])


class Body(nn.Module):
    """Two linear layers, a buffer, and a given forward."""

    def __init__(self, body):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))
        self.body = body

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def convert(model, how, *args, **kwargs):
    if how == "ahead of time":
        return ampgraph.convert(model, args, kwargs, dtype=BF16, capture="ahead of time")
    return ampgraph.convert(model, dtype=BF16)


def same(actual, expected, rel=0.03):
    """Same structure and types, tensors of the same dtype and close values."""
    ours, our_spec = pytree.tree_flatten(actual)
    theirs, their_spec = pytree.tree_flatten(expected)
    assert our_spec == their_spec
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype
            close(a, b, rel)
        else:
            assert a == b


def check(body, how, *args, **kwargs):
    """Converted and source model, each on its own copies, agree in results and in what they write."""
    model = Body(body)
    source = copy.deepcopy(model)
    amp = convert(model, how, *copy.deepcopy(args), **copy.deepcopy(kwargs))
    ours, theirs = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
    for _ in range(2):
        same(amp(*ours[0], **ours[1]), source(*theirs[0], **theirs[1]))
        same(ours, theirs)
    same(dict(model.named_buffers()), dict(source.named_buffers()))
    return amp


# -- inputs ---------------------------------------------------------------------------------------------


@CAPTURES
def test_keyword_arguments(how):
    check(lambda self, x, *, mask=None: self.a(x) * mask, how, X, mask=torch.ones(4, 1))


def test_keyword_arguments_only():
    model = Body(lambda self, x: self.a(x))
    amp = ampgraph.convert(model, kwargs={"x": X}, dtype=BF16)
    same(amp(x=X), model(x=X))


@CAPTURES
def test_an_argument_by_position_then_by_keyword(how):
    model = nn.Linear(8, 8)
    amp = convert(model, how, X)
    same(amp(input=X), model(X))


@CAPTURES
def test_nested_inputs(how):
    check(lambda self, d, pair: self.a(d["x"][0]) + self.b(pair[1]), how, {"x": [X, X]}, (X, X))


@CAPTURES
def test_int_bool_and_float64_inputs(how):
    check(
        lambda self, i, m, d: (self.a(F.one_hot(i, 8).float()).masked_fill(m, 0.0), d * 2),
        how, torch.tensor([1, 2]), torch.zeros(2, 8, dtype=torch.bool), torch.randn(2, dtype=torch.float64),
    )  # fmt: skip


@CAPTURES
def test_python_values_are_part_of_the_capture(how):
    model = Body(lambda self, x, flag, n: self.a(x) if flag else self.b(x) * n)
    amp = convert(model, how, X, True, 2)
    same(amp(X, True, 2), model(X, True, 2))
    same(amp(X, False, 3), model(X, False, 3))
    same(amp(X, False, 2), model(X, False, 2))
    same(amp(X, True, 2), model(X, True, 2))


@CAPTURES
def test_none_inputs(how):
    model = Body(lambda self, x, y=None: self.a(x) if y is None else self.a(x) + y)
    amp = convert(model, how, X, None)
    same(amp(X, None), model(X, None))
    same(amp(X, X), model(X, X))
    same(amp(X), model(X))


@CAPTURES
def test_low_precision_inputs(how):
    """A model that is fed low tensors in the source keeps doing so."""
    model = nn.Linear(8, 8).to(BF16)
    amp = convert(model, how, X.to(BF16))
    assert amp(X.to(BF16)).dtype == BF16
    assert torch.equal(amp(X.to(BF16)), model(X.to(BF16)))


def test_a_single_tensor_instead_of_a_tuple():
    assert ampgraph.convert(nn.Linear(8, 8), X, dtype=BF16)(X).shape == (4, 8)


@CAPTURES
def test_inputs_that_require_gradients(how):
    amp = convert(nn.Linear(8, 8), how, X)
    x = X.clone().requires_grad_()
    amp(x).sum().backward()
    assert x.grad.dtype == FP32
    assert torch.isfinite(x.grad).all()


# -- outputs --------------------------------------------------------------------------------------------


OUTPUTS = {
    "tensor": lambda y: y,
    "1-tuple": lambda y: (y,),
    "list": lambda y: [y, y * 2],
    "dict": lambda y: {"a": y, "b": [y, (y,)]},
    "none": lambda y: (y, None),
    "constants": lambda y: (y, 3, "text", 2.5, True),
    "twice": lambda y: (y, y),
    "int": lambda y: (y, y.argmax(-1)),
    "size": lambda y: y.shape[0] * y,
    "dtypes": lambda y: (y.double(), y.to(torch.float16)),
    "0-dim": lambda y: y[0, 0],
    "empty": lambda y: (),
}


@CAPTURES
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(how, name):
    check(lambda self, x: OUTPUTS[name](self.a(x)), how, X)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@CAPTURES
def test_named_tuple_output(how):
    amp = check(lambda self, x: Pair(self.a(x), self.b(x)), how, X)
    assert isinstance(amp(X), Pair)


@CAPTURES
def test_model_output_of_transformers(how):
    """An ordered dict with attributes, as transformers' models return."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = Body(
        lambda self, x: outputs.BaseModelOutput(last_hidden_state=self.a(x), hidden_states=(x, self.b(x)))
    )
    amp = convert(model, how, X)
    found = amp(X)
    assert type(found) is outputs.BaseModelOutput
    close(found.last_hidden_state, model(X).last_hidden_state)
    close(found["hidden_states"][1], model(X).hidden_states[1])


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    note: str


@CAPTURES
def test_dataclass_output(how):
    """Registered with torch's pytree it works; unregistered, ahead of time, the error says what is wrong."""
    model = Body(lambda self, x: Result(self.a(x), "n"))
    if how == "ahead of time":
        with pytest.raises(CaptureError, match="Result"):
            convert(model, how, X)
        return
    found = convert(model, how, X)(X)
    assert isinstance(found, Result)
    close(found.value, model(X).value)


@CAPTURES
def test_input_returned_unchanged(how):
    check(lambda self, x: (x, self.a(x), self.count), how, X)


@CAPTURES
def test_tuple_and_list_ops(how):
    def body(self, x):
        a, b = self.a(x).chunk(2, -1)
        c = torch.stack(torch.unbind(self.b(x), 1)[:4], 1)
        value, index = c.max(-1)
        return torch.cat([a, b, c], -1), value, index

    model = Body(body)
    amp = convert(model, how, X)
    ours, theirs = amp(X), model(X)
    close(ours[0], theirs[0])
    close(ours[1], theirs[1])
    assert ours[2].dtype == torch.int64


# -- writing in place -----------------------------------------------------------------------------------


def slice_assignment(self, x):
    y = self.a(x)
    y[:, :4] = self.b(x)[:, 4:]
    return y, y.sum()


def through_a_view(self, x):
    y = self.a(x)
    y.view(-1)[::2].mul_(2.0)
    return self.b(y)


def on_a_buffer(self, x):
    self.count.add_(x.mean(0))
    return self.a(x) + self.count


def replacing_a_buffer(self, x):
    self.count = self.count + x.mean(0)
    return self.a(x) + self.count


def on_an_input(self, x):
    x.add_(1.0)
    return self.a(x)


def part_of_an_input(self, x):
    x[0] = 0.0
    return self.a(x)


def by_index(self, x):
    y = self.a(x)
    y[torch.tensor([0, 2])] = 1.0
    y[y < 0] = 0.0
    return y


def zeros_then_filled(self, x):
    y = torch.zeros(4, 16)
    y[:, :8] = self.a(x)
    y[:, 8:].copy_(x)
    return y.sigmoid()


def chain(self, x):
    y = self.a(x)
    y = F.relu(y, inplace=True).add_(1).mul_(0.5)
    return self.b(y), y


def both_names(self, x):
    y = self.a(x)
    z = y.clamp_(min=0)
    return y + 1, z * 2


def low_into_fp32(self, x):
    y = torch.exp(x)
    y += self.a(x)
    return y


def out_of_a_loop(self, x):
    total = torch.zeros_like(x)
    for _ in range(3):
        total += self.a(x)
    return total


def transposed(self, x):
    y = self.a(x)
    y.t()[0].fill_(3.0)
    return self.b(y)


WRITES = [
    *(slice_assignment, through_a_view, on_a_buffer, replacing_a_buffer, on_an_input, part_of_an_input),
    *(by_index, zeros_then_filled, chain, both_names, low_into_fp32, out_of_a_loop, transposed),
]


@CAPTURES
@pytest.mark.parametrize("body", WRITES, ids=lambda f: f.__name__)
def test_writing_in_place(how, body):
    check(body, how, X)


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("body", WRITES, ids=lambda f: f.__name__)
def test_writing_in_place_at_other_levels(body, level):
    model = Body(body)
    source = copy.deepcopy(model)
    x, y = X.clone(), X.clone()
    amp = ampgraph.convert(model, (X.clone(),), policy=level, dtype=BF16)
    same(amp(x), source(y), 0.06)
    same(x, y)
    same(model.count, source.count)


@pytest.mark.parametrize("body", [slice_assignment, through_a_view, low_into_fp32], ids=lambda f: f.__name__)
def test_gradients_through_writes(body):
    model = Body(body)
    source = copy.deepcopy(model)
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    for m in (amp, source):
        pytree.tree_leaves(m(X))[0].sum().backward()
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        if theirs.grad is not None:
            close(ours.grad, theirs.grad, 0.05)


# -- shapes and dtypes at call time ----------------------------------------------------------------------


@CAPTURES
def test_other_shapes(how):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    amp = convert(model, how, X)
    for shape in ((4, 8), (7, 8), (1, 8), (0, 8), (2, 3, 8), (9, 8), (8,)):
        x = torch.randn(shape)
        assert amp(x).shape == model(x).shape
        close(amp(x), model(x))


def test_other_shapes_settle_on_one_dynamic_graph():
    amp = convert(nn.Linear(8, 8), "ahead of time", X)
    for n in range(5, 15):
        amp(torch.randn(n, 8))
    assert len(amp.graph_modules) == 2


@CAPTURES
def test_other_dtypes(how):
    model = Fn(lambda x: x * 2)
    amp = convert(model, how, X)
    for dtype in (torch.float64, torch.int64, BF16, torch.float16):
        assert amp(X.to(dtype)).dtype == dtype


def test_dynamic_shapes():
    model = nn.Linear(8, 8)
    amp = ampgraph.convert(model, (X,), dtype=BF16, dynamic_shapes=({0: Dim("batch", min=2)},))
    for n in (2, 3, 50):
        same(amp(torch.ones(n, 8)), model(torch.ones(n, 8)))
    assert len(amp.graph_modules) == 1
    amp(torch.ones(1, 8))  # below the range: captured again


def test_dynamic_shapes_need_examples():
    with pytest.raises(CaptureError, match="example inputs"):
        ampgraph.convert(nn.Linear(8, 8), dynamic_shapes=({0: Dim.AUTO},))


def test_wrong_shape_raises_as_the_model_does():
    amp = convert(nn.Linear(8, 8), "ahead of time", X)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(4x9 and 8x8\)"):
        amp(torch.randn(4, 9))
    assert amp(X).shape == (4, 8)


# -- regions --------------------------------------------------------------------------------------------


@CAPTURES
def test_no_grad_inside_the_model(how):
    def body(self, x):
        with torch.no_grad():
            y = self.a(x)
        return self.b(y)

    model = Body(body)
    amp = convert(model, how, X)
    amp(X).sum().backward()
    assert model.a.weight.grad is None
    assert model.b.weight.grad is not None


@CAPTURES
def test_a_value_shared_across_grad_modes(how):
    """The cast of x is shared by a no-grad and a grad region; gradients must flow through the second."""

    def body(self, x):
        with torch.no_grad():
            y = self.a(x)
        return self.b(x) + y

    model = Body(body)
    amp = convert(model, how, X)
    x = X.clone().requires_grad_()
    amp(x).sum().backward()
    reference = copy.deepcopy(model)
    x2 = X.clone().requires_grad_()
    reference(x2).sum().backward()
    close(x.grad, x2.grad)


@CAPTURES
def test_detach_and_no_grad_function(how):
    @torch.no_grad()
    def b(self, x):
        return self.b(x)

    check(lambda self, x: self.a(x).detach() + b(self, x), how, X)


@CAPTURES
@pytest.mark.parametrize("enabled", [True, False])
def test_ambient_autocast_changes_nothing(how, enabled):
    """Around convert or around calls: the model's precision is the policy's alone, in backward too."""
    model = Body(lambda self, x: torch.cumsum(self.a(x), -1) + torch.exp(x))
    plain = convert(copy.deepcopy(model), how, X)
    with torch.autocast("cpu", dtype=BF16, enabled=enabled):
        amp = convert(model, how, X)
        inside = amp(X)
        inside.sum().backward()
    outside = amp(X)
    expected = plain(X)
    expected.sum().backward()
    assert torch.equal(inside, expected)
    assert torch.equal(outside, expected)
    assert torch.equal(model.a.weight.grad, plain.a.weight.grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("ambient", [BF16, torch.float16])
def test_ambient_autocast_around_the_backend_changes_nothing(ambient, backend):
    """Nor does one that begins or ends after the first call."""
    model = Body(lambda self, x: torch.cumsum(self.a(x), -1) + torch.exp(x))
    options = {"dtype": torch.float16, "backend": backend}
    expected = ampgraph.convert(model, (X,), policy=Policy(dtype=torch.float16, loss_scale=NoLossScale()))(X)
    (gradient,) = torch.autograd.grad(expected.sum(), model.a.weight)
    compiled = torch.compile(model, backend="ampgraph", options=options)
    for enabled in (True, False, True):
        with torch.autocast("cpu", dtype=ambient, enabled=enabled):
            found = compiled(X)
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found.sum(), model.a.weight)[0], gradient)


@pytest.mark.parametrize("given", [{}, {"dtype": torch.float16}])
def test_ambient_autocast_names_the_dtype_that_the_options_do_not(given):
    model = Body(lambda self, x: self.a(x))
    compiled = torch.compile(model, backend="ampgraph", options=given)
    for ambient in (torch.float16, BF16, None):
        with torch.autocast("cpu", dtype=ambient, enabled=ambient is not None):
            found = compiled(X)
        dtype = given.get("dtype") or ambient or BF16
        assert torch.equal(found, ampgraph.convert(model, (X,), dtype=dtype)(X))


@CAPTURES
def test_ambient_autocast_at_o0(how):
    model = nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=BF16):
        amp = ampgraph.convert(model, (X,) if how == "ahead of time" else None, policy="O0")
        found = amp(X)
    assert torch.equal(found, model(X))


@CAPTURES
def test_ambient_autocast_does_not_override_an_fp32_guard(how):
    def body(self, x):
        with ampgraph.fp32_guard():
            return self.a(x)

    model = Body(body)
    amp = convert(model, how, X)
    with torch.autocast("cpu", dtype=BF16):
        found = amp(X)
    assert torch.equal(found, model(X))


@CAPTURES
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_checkpoint_around_a_converted_block(how, level):
    """Its first call captures inside the region: what that saves is not counted as the region's."""
    model, y = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), X.clone().requires_grad_()
    policy = Policy(level, dtype=BF16)
    expected = ampgraph.convert(model, (y,), policy=policy)(y)
    gradients = torch.autograd.grad(expected.sum(), [y, *model.parameters()])
    if how == "ahead of time":
        ampgraph.convert_blocks(model, "", policy=policy)
        amp = model
    else:
        amp = ampgraph.convert(model, policy=policy)
    for _ in range(2):
        found = checkpoint(amp, y, use_reentrant=False)
        again = torch.autograd.grad(found.sum(), [y, *model.parameters()])
        assert torch.equal(found, expected)
        assert all(map(torch.equal, again, gradients))


@CAPTURES
def test_activation_checkpointing(how):
    def body(self, x):
        return checkpoint(lambda t: self.b(torch.relu(self.a(t))), x, use_reentrant=False)

    model = Body(body)
    source = copy.deepcopy(model)
    amp = convert(model, how, X)
    amp(X).sum().backward()
    source(X).sum().backward()
    assert dtype_of(amp.graph_module, "linear") == [BF16, BF16]
    close(model.a.weight.grad, source.a.weight.grad, 0.05)


@CAPTURES
def test_checkpointing_reaches_the_layers(how):
    model = Body(lambda self, x: checkpoint(self.a, x, use_reentrant=False))
    amp = convert(model, how, X)
    amp(X)
    assert dtype_of(amp.graph_module, "linear") == [BF16]


@CAPTURES
def test_cond(how):
    """Branches of torch.cond run as they are, in float32, or low: either way right."""
    check(lambda self, x: torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (self.a(x),)), how, X)


def test_graph_breaks_just_in_time():
    def body(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)

    model = Body(body)
    amp = ampgraph.convert(model, dtype=BF16)
    close(amp(X), model(X))
    assert len(amp.graph_modules) == 2
    assert [dtype_of(g, "linear") for g in amp.graph_modules] == [[BF16], [BF16]]
    amp(X).sum().backward()


def test_a_graph_that_reads_only_a_size():
    class OfSizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            rows = x.size(0)
            torch._dynamo.graph_break()
            learned = self.fc(torch.ones(rows, 4))
            torch._dynamo.graph_break()
            return self.fc(x) * learned

    model = OfSizes()
    amp = ampgraph.convert(model, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as told:
        for rows in (4, 6, 7):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(amp(x), model(x), rtol=0.05, atol=0.05)
    assert not any("unconverted" in str(each.message) for each in told)
    linears = [n for g in amp.graph_modules for n in g.graph.nodes if "linear" in str(n.target)]
    assert linears
    assert {n.meta["val"].dtype for n in linears} == {torch.bfloat16}


def test_data_dependent_branch_works_just_in_time():
    model = Body(lambda self, x: self.a(x) if x.sum() > 0 else self.b(x))
    amp = ampgraph.convert(model, dtype=BF16)
    for x in (X.abs(), -X.abs()):
        close(amp(x), model(x))


def cut(self, x, n=None):
    return self.a(x)[:, :n], x.new_zeros(n)


VALUE_SIZED = {
    "masked rows": (lambda self, x: self.a(x[x[:, 0] > 0]), (X,)),
    "positions": (lambda self, x: (self.a(x), torch.nonzero(x > 1)), (X,)),
    "unique numbers": (lambda self, x: (self.a(x), torch.unique((x * 2).int())), (X,)),
    "unique numbers, used": (
        lambda self, x: self.a(x) + torch.unique((x * 2).int()).float().cos().sum(),
        (X,),
    ),
    "a number's size": (cut, (X, torch.tensor(4))),
    "an arange": (lambda self, x, n: (self.a(x), torch.arange(n.item()) * 0.5), (X, torch.tensor(4))),
}


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.xfail(
                VERSION < (2, 13) and name == "a number's size",
                reason="torch 2.11 exports no slice up to a number in a tensor; a named limit",
                strict=True,
            ),
        )
        for name in VALUE_SIZED
    ],
)
def test_sizes_that_depend_on_values(name, level):
    body, args = VALUE_SIZED[name]
    model = Body(body).eval()
    with torch.no_grad():
        amp = ampgraph.convert(copy.deepcopy(model), args, policy=level, dtype=BF16, capture="ahead of time")
        other = (X.flip(1), *args[1:])
        for inputs in (args, other):
            found, expected = amp(*inputs), model(*inputs)
            found, expected = (v if isinstance(v, tuple) else (v,) for v in (found, expected))
            for one, exact in zip(found, expected, strict=True):
                close(one, exact)
    assert str(ampgraph.explain(amp.graph_module))


def failing(*_, **__):
    raise PassError("pass 'propagate' failed: SomeError: a size")


def test_a_pass_that_fails_on_the_whole_graph_leaves_it_to_be_captured_just_in_time(monkeypatch):
    monkeypatch.setattr("ampgraph.runtime.graph_maker.rewrite", failing)
    model = Body(lambda self, x: self.a(x))
    with pytest.raises(PassError, match="'propagate'"):
        ampgraph.convert(model, (X,), dtype=BF16, capture="ahead of time")
    with pytest.warns(UserWarning, match=r"'propagate' failed.*just in time instead"):
        amp = ampgraph.convert(model, (X,), dtype=BF16)
    close(amp(X), model(X))
    assert dtype_of(amp.graph_modules[0], "linear") == [BF16]
    at_first_call = ampgraph.convert(model, capture="auto", dtype=BF16)
    with pytest.warns(UserWarning, match=r"'propagate' failed.*just in time instead"):
        close(at_first_call(X), model(X))


def test_a_list_is_not_taken_for_the_arguments():
    """It may be all of them or the only one; torch.export refuses it too."""
    with pytest.raises(CaptureError, match=r"args is a list.*\(\[x, y\],\)"):
        ampgraph.convert(nn.Linear(8, 8), [X])
    summed = Body(lambda self, xs: self.a(xs[0] + xs[1]))
    close(ampgraph.convert(summed, ([X, X],), dtype=BF16)([X, X]), summed([X, X]))
    close(ampgraph.convert(summed.a, X, dtype=BF16)(X), summed.a(X))


@pytest.mark.parametrize("function", [ampgraph.convert, ampgraph.export])
@pytest.mark.parametrize("given", ["O2", torch.float16, "model.pt2"])
def test_an_option_in_the_place_of_keyword_arguments(function, given):
    with pytest.raises(
        CaptureError, match=rf"kwargs is .*pass a dict.*{function.__name__}\(model, args, policy"
    ):
        function(nn.Linear(8, 8), (X,), given)


def test_random_numbers_are_drawn_at_each_call():
    amp = ampgraph.convert(Fn(lambda x: F.dropout(x, 0.5, training=True)), (X,), dtype=BF16)
    assert not torch.equal(amp(X), amp(X))


# -- kinds of models -------------------------------------------------------------------------------------


def test_exported_program_in_and_out():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    program = torch.export.export(model, (X,), strict=False)
    before = str(program.graph)
    low = ampgraph.convert(program, dtype=BF16)
    assert isinstance(low, torch.export.ExportedProgram)
    assert low is not program
    assert str(program.graph) == before
    assert dtype_of(low.graph_module, "linear") == [BF16]
    same(low.module()(X), model(X))
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    assert torch.equal(low.module()(X), amp(X))


def test_saved_and_loaded_program():
    program = ampgraph.export(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (X,), dtype=BF16)
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    loaded = torch.export.load(stream)
    assert dtype_of(loaded.graph_module, "linear") == [BF16]
    assert torch.equal(loaded.module()(X), program.module()(X))


def test_program_with_dynamic_shapes():
    program = ampgraph.export(nn.Linear(8, 8), (X,), dtype=BF16, dynamic_shapes=({0: Dim("n", min=2)},))
    assert program.module()(torch.randn(11, 8)).shape == (11, 8)


def test_program_takes_no_example_inputs():
    program = torch.export.export(nn.Linear(8, 8), (X,), strict=False)
    with pytest.raises(CaptureError, match="captured already"):
        ampgraph.convert(program, (X,))


def test_functionalized_program():
    """A decomposed program (inference IR) is converted or refused by name, never silently wrong."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).eval()
    program = torch.export.export(model, (X,), strict=False).run_decompositions()
    try:
        low = ampgraph.convert(program, dtype=BF16)
    except AmpGraphError:
        return
    same(low.module()(X), model(X))


@pytest.mark.parametrize("how", ["ahead of time", "just in time"])
def test_symbolically_traced_graph_module(how):
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    amp = convert(model, how, X)
    same(amp(X), model(X))
    assert dtype_of(amp.graph_module, "linear") == [BF16, BF16]


@pytest.mark.parametrize("how", ["ahead of time", "just in time"])
def test_unlifted_export_as_a_model(how):
    source = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model = torch.export.export(source, (X,), strict=False).module()
    amp = convert(model, how, X)
    same(amp(X), source(X))
    assert dtype_of(amp.graph_module, "linear") == [BF16]


def test_the_graph_of_a_converted_model_converts_again_to_the_same():
    amp = ampgraph.convert(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), (X,), dtype=BF16)
    again = ampgraph.convert(amp.graph_module, (X,), dtype=BF16)
    assert torch.equal(again(X), amp(X))
    assert inserted(again.graph_module) == []


@CAPTURES
def test_model_without_parameters_or_floats(how):
    same(convert(nn.Identity(), how, X)(X), X)
    ids = torch.tensor([1, 2])
    amp = convert(Fn(lambda i: i * 2 + 1), how, ids)
    assert torch.equal(amp(ids), ids * 2 + 1)


@CAPTURES
def test_complex_numbers_are_left_alone(how):
    check(lambda self, x: torch.view_as_real(torch.fft.fft(self.a(x)) * 2j), how, X)


@CAPTURES
def test_a_custom_op_runs_in_fp32(how):
    name = "amp_tests::double_it"
    if not hasattr(torch.ops.amp_tests, "double_it"):
        op = torch.library.custom_op(name, mutates_args=())(_double_it)
        op.register_fake(lambda x: torch.empty_like(x))
    model = Body(lambda self, x: self.b(torch.ops.amp_tests.double_it(self.a(x))))
    amp = convert(model, how, X)
    same(amp(X), model(X))
    assert dtype_of(amp.graph_module, "double_it") == [FP32]


def _double_it(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32
    return x * 2


@CAPTURES
@pytest.mark.parametrize(("layer", "kernel"), [(nn.LSTM, "lstm"), (nn.GRU, "gru"), (nn.RNN, "rnn_tanh")])
def test_recurrent_layers(how, layer, kernel):
    """torch.compile skips them by itself."""
    model = nn.Sequential(nn.Linear(8, 8), layer(8, 8, batch_first=True))
    x = torch.randn(2, 3, 8)
    amp = convert(model, how, x)
    same(amp(x), model(x))
    assert len(amp.graph_modules) == 1
    found = [n for n in amp.graph_module.graph.nodes if str(n.target).startswith(f"aten.{kernel}")]
    assert [n.meta["val"][0].dtype for n in found] == [BF16]
    amp(x)[0].sum().backward()
    assert all(p.grad.dtype == FP32 for p in model.parameters())
    assert not torch._dynamo.config.allow_rnn


@pytest.mark.parametrize("args", [(torch.ones(3, 2, 8),), None], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN])
def test_recurrent_layers_train_on_compiled_backends(args, layer):
    model, x = nn.Sequential(nn.Linear(8, 8), layer(8, 8)), torch.randn(3, 2, 8)
    amp = ampgraph.convert(model, args, dtype=BF16, backend="aot_eager")
    same(amp(x), model(x))
    amp(x)[0].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_packed_sequences_just_in_time():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(8, 8, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)

    model, x, lengths = Packed(), torch.randn(2, 3, 8), torch.tensor([3, 2])
    amp = convert(model, "just in time")
    same(amp(x, lengths), model(x, lengths))


# -- errors ---------------------------------------------------------------------------------------------


def state_of(model):
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        [m.training for m in model.modules()],
        sorted(vars(model)),
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
    )


BROKEN = {
    "data-dependent branch": (lambda self, x: self.a(x) if x.sum() > 0 else x, (X,)),
    "wrong shape": (lambda self, x: self.a(x), (torch.randn(4, 9),)),
    "too many inputs": (lambda self, x: self.a(x), (X, X)),
    "too few inputs": (lambda self, x, y: self.a(x), (X,)),
    "raises": (lambda self, x: 1 / 0, (X,)),
    "unknown input type": (lambda self, x: self.a(x.value), (object(),)),
    "set output": (lambda self, x: {self.a(x)}, (X,)),
    "object output": (lambda self, x: object(), (X,)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_captured_is_a_capture_error_and_changes_nothing(name):
    body, args = BROKEN[name]
    model = Body(body)
    before = state_of(model)
    with pytest.raises(CaptureError) as error:
        ampgraph.convert(model, args, dtype=BF16, capture="ahead of time")
    assert "Body" in str(error.value)
    after = state_of(model)
    assert all(torch.equal(v, after[0][k]) for k, v in before[0].items())
    assert before[1:] == after[1:]


def test_capture_error_names_the_users_line_and_a_way_out():
    body, args = BROKEN["data-dependent branch"]
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+") as error:
        ampgraph.convert(Body(body), args, capture="ahead of time")
    assert "torch.cond" in str(error.value)
    assert "just in time" in str(error.value)


def test_a_failed_conversion_does_not_spoil_the_next():
    body, args = BROKEN["data-dependent branch"]
    with pytest.raises(CaptureError):
        ampgraph.convert(Body(body), args, capture="ahead of time")
    amp = ampgraph.convert(nn.Linear(8, 8), (X,), dtype=BF16)
    assert dtype_of(amp.graph_module, "linear") == [BF16]
    assert not torch.is_autocast_enabled("cpu")


def test_writes_to_buffers_during_a_failed_capture_are_undone():
    def body(self, x):
        self.count.add_(1.0)
        self.note = "set"
        if x.sum() > 0:
            x = x * 2
        return self.a(x) + self.count

    model = Body(body)
    with pytest.raises(CaptureError):
        ampgraph.convert(model, (X,), capture="ahead of time")
    assert torch.equal(model.count, torch.zeros(8))
    assert type(model.count) is torch.Tensor


@pytest.mark.parametrize(
    "model", [nn.Linear, 3, None, "model", torch.relu, X, {}], ids=lambda m: type(m).__name__
)
def test_what_is_no_model(model):
    with pytest.raises(CaptureError, match=r"nn\.Module"):
        ampgraph.convert(model, (X,))


def test_a_class_is_told_to_be_called():
    with pytest.raises(CaptureError, match="instance"):
        ampgraph.convert(nn.ReLU, (X,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused():
    scripted = torch.jit.trace(nn.Linear(8, 8).eval(), X)
    for model in (scripted, torch.jit.freeze(scripted)):
        with pytest.raises(CaptureError, match="TorchScript"):
            ampgraph.convert(model, (X,))


def test_a_converted_model_is_refused():
    with pytest.raises(PolicyError, match="converted already"):
        ampgraph.convert(ampgraph.convert(nn.Linear(8, 8), (X,)), (X,))


def test_meta_device_model():
    """Weights that do not exist yet: the graph is planned, and runs once they do."""
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    try:
        amp = ampgraph.convert(model, (X.to("meta"),), dtype=BF16)
    except AmpGraphError:
        return
    assert amp(X.to("meta")).device.type == "meta"


def test_example_inputs_on_another_device():
    with pytest.raises(CaptureError):
        ampgraph.convert(nn.Linear(8, 8), (X.to("meta"),))


def test_backend_and_options():
    with pytest.raises(PolicyError, match="inductor"):
        ampgraph.convert(nn.Linear(8, 8), (X,), backend="inducter")
    with pytest.raises(PolicyError, match="low dtype"):
        ampgraph.convert(nn.Linear(8, 8), (X,), dtype=torch.float32)
    with pytest.raises(PolicyError, match="no policy 'O9'; legal: O0, O1"):
        ampgraph.convert(nn.Linear(8, 8), (X,), policy="O9")


def test_kwargs_of_the_wrong_kind():
    with pytest.raises((AmpGraphError, TypeError)):
        ampgraph.convert(nn.Linear(8, 8), (X,), [1])


def test_parameter_of_low_dtype_in_an_fp32_model():
    """A layer that the user already made low stays low."""
    model = nn.Sequential(nn.Linear(8, 8).to(BF16), Fn(lambda x: x.float()), nn.Linear(8, 8))
    amp = ampgraph.convert(model, (X.to(BF16),), dtype=BF16)
    same(amp(X.to(BF16)), model(X.to(BF16)))


def test_models_own_casts_are_kept():
    model = Fn(lambda x, w: (x.half() @ w.half()).float().double())
    w = torch.randn(8, 8)
    amp = ampgraph.convert(model, (X, w), dtype=BF16)
    assert torch.equal(amp(X, w), model(X, w))
    assert len(nodes_of(amp.graph_module, "to")) + len(nodes_of(amp.graph_module, "_to_copy")) == 4


def test_a_capture_has_the_source_lines_and_the_code_of_torchs_own_export():
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x)
        return nn.Sequential(self.b, nn.ReLU())(x)

    model = Body(forward)
    ours = capture_program(model, (X,)).graph_module
    theirs = torch.export.export(model, (X,), strict=False).graph_module
    parts = zip(ours.modules(), theirs.modules(), strict=True)
    for mine, other in [pair for pair in parts if isinstance(pair[0], fx.GraphModule)]:
        assert mine.code == other.code
        for node, wanted in zip(mine.graph.nodes, other.graph.nodes, strict=True):
            assert node.stack_trace == wanted.stack_trace
    assert any("self.b, nn.ReLU" in (node.stack_trace or "") for node in ours.graph.nodes)


def test_an_argument_may_have_the_name_of_a_buffer():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(8))
            self.register_buffer("linear_weight", torch.full((8,), 2.0))

        def forward(self, x, mask):
            return self.linear(x) * self.mask + mask * self.linear_weight

    model = Named()
    args = X, torch.zeros(8)
    amp = ampgraph.convert(model, args, dtype=torch.bfloat16, capture="ahead of time")
    close(amp(*args), model(*args))
