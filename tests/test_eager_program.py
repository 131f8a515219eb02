"""Graphs on the backend "eager" run as Python functions: same values, same gradients, live parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph
from ampgraph import Policy
from ampgraph.ops.bindings import BINDINGS, call_of
from ampgraph.runtime.eager_program import eager_program, is_writable
from tests.models import NormWithCasts

aten = torch.ops.aten
torch.manual_seed(0)
X, Y, VECTOR = torch.rand(4, 6) + 0.5, torch.rand(4, 6) + 0.5, torch.rand(6) + 0.5
CUBE, IMAGE, HEADS = torch.randn(2, 3, 4), torch.randn(2, 4, 8, 8), torch.randn(2, 3, 5, 4)
INDEX, MASK, BF16 = torch.tensor([[0, 2], [1, 1], [3, 0], [2, 2]]), X > 1, torch.bfloat16

# Overload -> calls, each ``(args, kwargs)``: the forms in which captured graphs write them.
CALLS = {
    "_foreach_add_.Scalar": [(([X + 0, VECTOR + 0], 2), {})],
    "_foreach_copy_": [(([X + 0, VECTOR + 0], [Y.bfloat16(), VECTOR.double()]), {})],
    "_foreach_mul.Tensor": [(([X, VECTOR], torch.tensor(3.0)), {})],
    "_foreach_norm.Scalar": [(([X, VECTOR], float("inf")), {})],
    "_log_softmax": [((X, -1, False), {})],
    "_log_softmax_backward_data": [((X, Y.log_softmax(-1), -1, torch.float32), {})],
    "_softmax": [((X, -1, False), {})],
    "_softmax_backward_data": [((X, Y.softmax(-1), -1, torch.float32), {})],
    "abs": [((X,), {})],
    "adaptive_avg_pool2d": [((IMAGE, [2, 3]), {})],
    "add.Tensor": [((X, Y), {}), ((X, 2), {}), ((X.bfloat16(), VECTOR), {"alpha": 2})],
    "add_.Tensor": [((INDEX, 1), {})],
    "addmm": [((VECTOR, X.T[:4, :4], X), {"beta": 2})],
    "amax": [((CUBE, [0, 2], True), {}), ((X,), {})],
    "avg_pool2d": [((IMAGE, [2, 2]), {}), ((IMAGE, [2, 2], [1, 1], [1, 1], True, False), {})],
    "batch_norm": [((X, VECTOR, VECTOR, VECTOR * 0, VECTOR, t, 0.1, 1e-5, False), {}) for t in (True, False)],
    "bmm": [((CUBE, CUBE.mT), {})],
    "cat": [(([X, Y.bfloat16()], -1), {})],
    "clamp": [((X, 0.6), {}), ((X, None, 1.0), {})],
    "clone": [((IMAGE,), {"memory_format": torch.channels_last}), ((X,), {})],
    "contiguous": [((X.T,), {})],
    "conv1d": [((CUBE, torch.ones(2, 3, 3), None, [1], [1]), {})],
    "conv2d": [((IMAGE, torch.ones(8, 2, 3, 3), torch.ones(8), [2, 2], [1, 1], [1, 1], 2), {})],
    "conv3d": [((IMAGE[None], torch.ones(2, 2, 1, 3, 3)), {})],
    "conv_transpose2d.input": [
        ((IMAGE, torch.ones(4, 2, 2, 2)), {}),
        ((IMAGE, torch.ones(4, 2, 2, 2), None, [2, 2]), {}),
    ],
    "convolution": [((IMAGE, torch.ones(8, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 2), {})],
    "copy_": [((torch.zeros(4, 6), Y), {})],
    "cos": [((X,), {})],
    "cumsum": [((X, -1), {"dtype": torch.float64}), ((X, 0), {})],
    "detach": [((X,), {})],
    "div.Tensor": [((X, Y), {}), ((X, 3), {})],
    "div.Tensor_mode": [((X, Y), {"rounding_mode": "floor"})],
    "dropout": [((X, 0.5, True), {}), ((X, 0.5, False), {})],
    "elu": [((X - 1,), {}), ((X, 0.5), {})],
    "embedding": [((X, INDEX), {}), ((X, INDEX, 0, False, False), {})],
    "empty_like": [((X[:0],), {"dtype": BF16}), ((X[:0].T,), {"pin_memory": False})],
    "eq.Scalar": [((INDEX, 2), {})],
    "eq.Tensor": [((X, Y), {})],
    "erf": [((X,), {})],
    "exp": [((X,), {})],
    "expand": [((VECTOR, [3, -1]), {}), ((X[0, 0], [2]), {}), ((X[0, 0], []), {})],
    "expand_as": [((VECTOR, X), {})],
    "flatten.using_ints": [((IMAGE, 1), {}), ((IMAGE, 1, 2), {})],
    "gather": [((X, 1, INDEX), {})],
    "ge.Scalar": [((X, 1), {})],
    "gelu": [((X,), {}), ((X,), {"approximate": "tanh"})],
    "group_norm": [((IMAGE, 2, torch.ones(4), torch.zeros(4), 1e-5, False), {})],
    "gt.Scalar": [((X, 1), {})],
    "hardsigmoid": [((X,), {})],
    "hardswish": [((X,), {})],
    "hardtanh": [((X - 2,), {}), ((X, 0.0, 1.0), {})],
    "index_select": [((X, 1, INDEX[0]), {})],
    "isfinite": [((X,), {})],
    "layer_norm": [((X, [6], VECTOR, VECTOR), {}), ((X, [6], None, None, 1e-3, False), {})],
    "le.Scalar": [((X, 1), {})],
    "leaky_relu": [((X - 1,), {}), ((X - 1, 0.2), {})],
    "linear": [((X, Y, torch.ones(4)), {}), ((X, Y), {})],
    "log": [((X,), {})],
    "log_softmax.int": [((X, -1), {}), ((X.bfloat16(), -1, torch.float32), {})],
    "logical_and": [((MASK, X), {})],
    "logical_not": [((MASK,), {})],
    "lt.Scalar": [((X, 1), {})],
    "lt.Tensor": [((X, Y), {})],
    "masked_fill.Scalar": [((X, MASK, float("-inf")), {})],
    "masked_fill.Tensor": [((X, MASK, torch.tensor(2.0)), {})],
    "matmul": [((CUBE, CUBE.mT), {}), ((X, VECTOR), {})],
    "max_pool2d": [((IMAGE, [2, 2]), {}), ((IMAGE, [3, 3], [2, 2], [1, 1]), {})],
    "maximum": [((X, Y), {})],
    "mean": [((X,), {}), ((INDEX,), {"dtype": torch.float32})],
    "mean.dim": [((X, [-1], True), {}), ((X, None), {"dtype": torch.float64})],
    "minimum": [((X, Y), {})],
    "mm": [((X, Y.T), {})],
    "movedim.int": [((CUBE, 0, -1), {})],
    "mul.Tensor": [((X, Y.bfloat16()), {}), ((X, 0.5), {})],
    "mul_.Tensor": [((INDEX, 3), {})],
    "native_batch_norm": [((X, VECTOR, VECTOR, VECTOR * 0, VECTOR, True, 0.1, 1e-5), {})],
    "native_dropout": [((X, 0.5, True), {})],
    "native_group_norm": [((IMAGE, torch.ones(4), torch.zeros(4), 2, 4, 64, 2, 1e-5), {})],
    "native_layer_norm": [((X, [6], VECTOR, None, 1e-5), {})],
    "ne.Scalar": [((INDEX, 1), {})],
    "neg": [((X,), {})],
    "ones_like": [((X,), {"dtype": BF16, "pin_memory": False})],
    "pad": [
        ((IMAGE, [1, 2]), {}),
        ((IMAGE, [1, 1, 1, 1], "reflect"), {}),
        ((X, [0, 1], "constant", 3.0), {}),
    ],
    "permute": [((CUBE, [2, 0, 1]), {})],
    "pow.Tensor_Scalar": [((X, 2), {}), ((X, 0.5), {})],
    "relu": [((X - 1,), {})],
    "relu_": [((INDEX - 1,), {})],
    "repeat": [((X, [2, 1, 3]), {})],
    "reshape": [((X.T, [4, 6]), {})],
    "rms_norm": [((X, [6], VECTOR, 1e-5), {}), ((X, [6]), {})],
    "roll": [((CUBE, [1]), {}), ((CUBE, [1, -1], [0, 2]), {})],
    "rsqrt": [((X,), {})],
    "rsub.Scalar": [((X, 1, 2), {}), ((X, 1), {})],
    "scaled_dot_product_attention": [
        ((HEADS, HEADS, HEADS), {}),
        ((HEADS,) * 3 + (None, 0.0, True), {"scale": 0.3}),
    ],
    "select.int": [((X, 1, -1), {})],
    "sigmoid": [((X,), {})],
    "silu": [((X,), {})],
    "sin": [((X,), {})],
    "slice.Tensor": [
        ((CUBE, 2, 1, -1), {}),
        ((CUBE, 0, 1, 9223372036854775807), {}),
        ((CUBE, 1, None, None, 2), {}),
        ((CUBE,), {}),
        ((CUBE, -1, 1), {}),
        ((CUBE, 1), {"end": 2}),
    ],
    "softmax.int": [((X, -1), {}), ((X.bfloat16(), -1, torch.float32), {})],
    "softplus": [((X,), {}), ((X, 2, 10), {})],
    "split.Tensor": [((X, 4, -1), {})],
    "split_with_sizes": [((X, [2, 4], 1), {})],
    "sqrt": [((X,), {})],
    "square": [((X,), {})],
    "squeeze.dim": [((X[:1], 0), {})],
    "stack": [(([X, Y], 1), {})],
    "sub.Tensor": [((X, Y), {}), ((X, 1), {"alpha": 3})],
    "sum": [((X,), {}), ((MASK,), {"dtype": torch.float32})],
    "sum.dim_IntList": [((X, [0], True), {}), ((X.bfloat16(), [0]), {"dtype": torch.float32})],
    "sym_size.int": [((X, 1), {})],
    "t": [((X,), {})],
    "tanh": [((X,), {})],
    "to.dtype": [
        *[((given, dtype), {}) for given in (X, X.T, INDEX) for dtype in (BF16, torch.float64, torch.int32)],
        ((X, torch.float32, False, True), {}),
        ((X, BF16, False, False, torch.contiguous_format), {}),
        ((X, BF16), {"copy": True}),
    ],
    "transpose.int": [((CUBE, 0, -1), {})],
    "tril": [((X,), {}), ((X, -1), {})],
    "triu": [((X,), {}), ((X, 1), {})],
    "type_as": [((X, INDEX), {})],
    "unbind.int": [((X, -1), {})],
    "unsqueeze": [((X, -1), {})],
    "view": [((X, [6, -1]), {}), ((X[0, 0], []), {}), ((X, [24]), {})],
    "view_as": [((X, CUBE), {})],
    "where.self": [((MASK, X, Y), {})],
    "zeros_like": [((X,), {"dtype": BF16})],
}


def overload(name: str):
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


def test_every_binding_is_called() -> None:
    assert {overload(name) for name in CALLS} == {*BINDINGS, aten.slice.Tensor}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_its_overload(name: str) -> None:
    for args, kwargs in CALLS[name]:
        found, positional = call_of(overload(name), args, kwargs)
        wanted, got = outcome(overload(name), args, kwargs), outcome(found, positional, kwargs)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def outcome(function: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Returns results, their strides, and the gradients of float arguments; in place, the arguments."""
    torch.manual_seed(0)
    own = pytree.tree_map_only(torch.Tensor, lambda a: a.detach().clone(), args)
    floats = [a for a in pytree.tree_leaves(own) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    name = function.__name__.partition(".")[0]
    if name.endswith("_"):
        function(*own, **kwargs)
        return pytree.tree_leaves(own)
    for a in floats:
        a.requires_grad_("foreach" not in name and ("norm" not in name or a.dim() > 1))
    results = pytree.tree_leaves(function(*own, **kwargs))
    wide = [r.double().sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if wide:
        sum(wide).backward()
    strides = [r.stride() for r in results if isinstance(r, torch.Tensor)]
    return [results, strides, [a.grad for a in floats]]


class Block(nn.Module):
    """A dict and a keyword go in, a tuple comes out; a buffer is written."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(6), nn.Linear(6, 16), nn.Linear(16, 6)
        self.register_parameter("0", nn.Parameter(torch.ones(6)))

    def forward(self, given, *, scale):
        x = self.norm(given["x"])
        hidden = self.up(x).relu()
        return {"y": self.down(hidden) * getattr(self, "0") * scale}, hidden.sum()


@pytest.fixture
def amp():
    torch.manual_seed(0)
    policy = ampgraph.Policy(dtype=torch.float16, loss_scale=ampgraph.StaticLossScale(8.0))
    return ampgraph.convert(Block(), ({"x": X},), {"scale": 2.0}, policy=policy)


def test_values_and_gradients_are_the_graphs(amp) -> None:
    graph = amp.training_graph
    program, states = eager_program(graph), []
    state = {k: v.clone() for k, v in amp.state_dict().items()}
    for run in (graph, program):
        amp.load_state_dict(state)
        amp.zero_grad()
        out, total = run({"x": X}, scale=2.0)
        (out["y"].sum() + total).backward()
        states.append(
            [out["y"], total, *(p.grad for p in amp.parameters()), *(b.clone() for b in amp.buffers())]
        )
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_parameters_are_read_where_they_are(amp) -> None:
    amp.eval()
    call = ({"x": X},), {"scale": 2.0}
    before = amp(*call[0], **call[1])[0]["y"]
    doubled = {name: p.detach() * 2 for name, p in amp.named_parameters() if name == "0"}
    out = functional_call(amp, doubled, *call)
    torch.testing.assert_close(out[0]["y"], before * 2)
    amp.load_state_dict({**amp.state_dict(), **doubled}, assign=True)
    torch.testing.assert_close(amp(*call[0], **call[1])[0]["y"], before * 2)


@pytest.mark.parametrize(
    ("dtype", "backend", "training"),
    [(torch.bfloat16, "eager", False), (torch.float16, "eager", True), (torch.float16, "aot_eager", True)],
)
def test_a_graph_that_is_edited_runs_as_edited(dtype: torch.dtype, backend: str, training: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    amp = ampgraph.convert(model, (X,), dtype=dtype, backend=backend)
    with torch.set_grad_enabled(training):
        assert (amp(X - 3) >= 0).all()
        graph = amp.graph_module.graph
        (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
        relu.replace_all_uses_with(relu.args[0])
        graph.erase_node(relu)
        amp.graph_module.recompile()
        assert (amp(X - 3) < 0).any()


def test_values_are_freed_after_their_last_use() -> None:
    alive: list[weakref.ref] = []

    def note(x):
        alive.append(weakref.ref(x))
        return sum(ref() is not None for ref in alive)

    amp = ampgraph.convert(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), (X,), dtype=torch.bfloat16)
    graph_module = amp.graph_module
    counts = []
    for linear in graph_module.graph.find_nodes(op="call_function", target=aten.linear.default):
        with graph_module.graph.inserting_after(linear):
            counts.append(graph_module.graph.call_function(note, (linear,)))
    output = graph_module.graph.output_node()
    output.args = ((output.args[0][0], *counts),)
    program = eager_program(graph_module)
    with torch.no_grad():
        assert program._function(X)[1:] == (1, 1, 1, 1)


def test_a_cast_that_nothing_reads_does_not_run() -> None:
    policy = Policy("O2", dtype=torch.bfloat16, rules={"mul": "low"})
    amp = ampgraph.convert(NormWithCasts(), (torch.randn(3, 8),), policy=policy)
    nodes = amp.graph_module.graph.nodes
    assert [n.name for n in nodes if n.op == "call_function" and not n.users] == ["to_1"]
    with CountCasts() as count:
        amp(torch.randn(3, 8))
    assert count.widened == 2  # the input of the norm, the output


class CountCasts(TorchDispatchMode):
    widened = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.widened += (kwargs or {}).get("dtype") is torch.float32
        return func(*args, **(kwargs or {}))


def test_an_error_shows_the_line(amp) -> None:
    with pytest.raises(RuntimeError) as caught:
        eager_program(amp.graph_module)({"x": X[:, :3]}, scale=2.0)
    assert "0.1, 1e-05" in str(caught.traceback[-1].statement)  # the call of batch_norm


def test_graphs_with_calls_of_modules_are_left_alone() -> None:
    assert not is_writable(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))))
