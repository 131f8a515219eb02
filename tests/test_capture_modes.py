"""One way in: `capture` says how a model is captured; what cannot be captured whole is captured in parts."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn

import ampgraph

from .helpers import close

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
BF16 = torch.bfloat16
SCALED = ampgraph.Policy(dtype=torch.float16, loss_scale=ampgraph.StaticLossScale(64.0))


class Branching(nn.Module):
    """Control flow that depends on values."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else -self.b(x)


class Normed(nn.Module):
    """Writes a buffer before it uses its weight."""

    def __init__(self):
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(torch.cat([self.norm(x[:, :8]) + torch.rand(8), x[:, 8:]], 1))


def messages(recwarn, part):
    return [str(w.message) for w in recwarn if part in str(w.message)]


def test_auto_falls_back_with_one_line_that_says_why(recwarn, caplog, capfd):
    model = Branching()
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    (told,) = messages(recwarn, "just in time")
    assert told.startswith("Branching could not be captured at ")
    assert f"{__file__}:" in told
    assert "\n" not in told
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)
    amp(X).sum().backward()
    assert len(messages(recwarn, "just in time")) == 1
    assert all(p.grad is not None for p in model.parameters())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("torch")]
    assert "def forward" not in "".join(capfd.readouterr())


class Packed(nn.Module):
    """A recurrent layer over packed sequences. Each call sets its attributes."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x, lengths):
        pack, unpack = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        packed = pack(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(unpack(self.rnn(packed)[0], batch_first=True)[0])


def test_packed_sequences_fall_back_with_one_line(recwarn):
    model, x, lengths = Packed().eval(), torch.randn(3, 7, 8), torch.tensor([7, 4, 5])
    amp = ampgraph.convert(model, (x, lengths), dtype=BF16)
    (told,) = [str(w.message) for w in recwarn]
    assert told.startswith("Packed could not be captured at ")
    assert "just in time instead" in told
    torch.testing.assert_close(amp(x, lengths), model(x, lengths), rtol=0.05, atol=0.05)


def test_an_output_of_an_unknown_class_falls_back_with_one_line(recwarn):
    class Cache:
        def __init__(self, value):
            self.value = value

    class Caches(nn.Linear):
        def forward(self, x):
            return super().forward(x), Cache(x * 2)

    model = Caches(8, 8)
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    (out, cache), wanted = amp(X), model(X)
    assert len([w for w in recwarn if w.category is UserWarning]) == 1
    torch.testing.assert_close(out, wanted[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(cache.value, wanted[1].value)


def test_a_failed_capture_leaves_torchs_log_and_output_as_they_were(capfd):
    known = {n: log for n, log in logging.root.manager.loggerDict.items() if isinstance(log, logging.Logger)}
    before = {name: list(log.filters) for name, log in known.items()}
    with pytest.raises(ampgraph.CaptureError, match=r"torch\.cond"):
        ampgraph.convert(Branching(), (X,), capture="ahead of time")
    assert {name: log.filters for name, log in known.items()} == before
    assert "def forward" not in "".join(capfd.readouterr())
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Branching(), (X,))
    assert "def forward" in capfd.readouterr().err


@pytest.mark.parametrize("capture", ["auto", "ahead of time"])
def test_the_first_call_captures_ahead_of_time_without_examples(capture):
    amp = ampgraph.convert(nn.Linear(8, 8), capture=capture, dtype=BF16)
    assert not amp.graph_modules
    assert amp(X).shape == (3, 8)
    assert len(amp.graph_modules) == 1
    assert amp.options.capture == capture
    amp(X[:2])
    assert len(amp.graph_modules) == 2


def test_dynamic_shapes_without_examples():
    batch = {0: torch.export.Dim("batch")}
    amp = ampgraph.convert(nn.Linear(8, 8), capture="ahead of time", dynamic_shapes=(batch,))
    amp(X)
    amp(X[:2])
    assert len(amp.graph_modules) == 1


class Identity(nn.Module):
    """As in PointNet: the size of an array of numbers is a symbol that no input has."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 9)

    def forward(self, x):
        x = self.last(self.norm(self.first(x)))
        identity = torch.from_numpy(np.eye(3).astype(np.float32).flatten())
        return x + torch.autograd.Variable(identity).view(1, 9).repeat(len(x), 1)


@pytest.mark.filterwarnings("ignore:.*captured in parts", "ignore:.*skipped")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sizes_of_arrays_bind_no_capture(backend):
    model, x = Identity().eval(), torch.randn(4, 8)
    amp = ampgraph.convert(model, dtype=torch.bfloat16, capture="just in time", backend=backend)
    for rows in (4, 2, 3):
        torch.testing.assert_close(amp(x[:rows]), model(x[:rows]), rtol=0.05, atol=0.05)


def test_the_mask_that_causal_attention_makes_has_any_size(recwarn):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    amp = ampgraph.convert(layer, policy="O2", dtype=torch.bfloat16, capture="just in time")
    for length in (8, 8, 5, 3):
        x, mask = torch.randn(2, length, 16), nn.Transformer.generate_square_subsequent_mask(length)
        torch.manual_seed(0)
        expected = layer(x, src_mask=mask, is_causal=True)
        torch.manual_seed(0)
        got = amp(x, src_mask=mask, is_causal=True)
        assert 0 < (got - expected).norm() < 0.02 * expected.norm()  # low, not run as it was
    assert not [w for w in recwarn if "ampgraph" in str(w.message)]


def test_just_in_time_with_examples_captures_at_the_first_call():
    amp = ampgraph.convert(nn.Linear(8, 8), (X,), capture="just in time")
    assert not amp.graph_modules
    amp(X)
    assert amp.options.just_in_time
    assert len(amp.graph_modules) == 1


@pytest.mark.parametrize(("capture", "near"), [("ahead of tme", "'ahead of time'"), ("jit", ""), (True, "")])
def test_what_is_no_way_to_capture(capture, near):
    legal = r"legal: 'auto', 'ahead of time', 'just in time'\."
    for convert in (
        lambda: ampgraph.convert(nn.Linear(8, 8), (X,), capture=capture),
        lambda: ampgraph.convert_blocks(nn.Sequential(nn.Linear(8, 8)), "0", capture=capture),
    ):
        with pytest.raises(ampgraph.PolicyError, match=rf"capture={capture!r} .*{legal}.*{near}"):
            convert()


@pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])
def test_a_model_without_forward_is_refused(args):
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(8, 2), nn.Linear(8, 1)

        def act(self, x):
            return self.actor(x)

    told = r"Agent has no forward.*convert_blocks\(model, \('actor', 'critic'\)\)"
    with pytest.raises(ampgraph.CaptureError, match=told):
        ampgraph.convert(Agent(), args)
    assert list(ampgraph.convert_blocks(agent := Agent(), ("actor", "critic"), dtype=BF16))
    assert agent.act(X).shape == (3, 2)


CONTAINERS = [nn.ModuleList([nn.Linear(8, 2)]), nn.ModuleDict({"0": nn.Linear(8, 2)})]


@pytest.mark.parametrize("container", CONTAINERS, ids=["list", "dict"])
def test_a_container_without_forward_is_told(container):
    with pytest.warns(UserWarning, match=r"no forward.*convert_blocks\(model, \('0',\)\)"):
        amp = ampgraph.convert(container)
    assert len(amp) == 1


def test_what_the_model_itself_refuses_is_no_reason_to_fall_back():
    for args in ((X[:, :5],), (X, X)):
        with pytest.raises(ampgraph.CaptureError, match="Linear"):
            ampgraph.convert(nn.Linear(8, 8), args)


@pytest.mark.parametrize("how", ["auto", "ahead of time", "just in time"])
def test_a_bad_shape_raises_the_models_own_error(how, caplog):
    model = Normed()
    amp = ampgraph.convert(model, (X,), capture=how, dtype=BF16)
    amp(X)
    with pytest.raises(RuntimeError) as expected:
        copy.deepcopy(model)(torch.randn(3, 9))
    caplog.clear()
    with pytest.raises(RuntimeError) as found:
        amp(torch.randn(3, 9))
    assert type(found.value) is RuntimeError
    assert str(found.value) == str(expected.value)
    assert "mat1 and mat2 shapes cannot be multiplied (3x9 and 8x8)" in str(found.value)
    assert any(entry.name == "forward" and str(entry.path) == __file__ for entry in found.traceback)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert amp.options.capture == how
    assert amp(X).shape == (3, 8)


def test_looking_for_the_models_own_error_changes_nothing():
    model = Normed()
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        amp(torch.cat([X, X[:, :1]], 1))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("how", ["auto", "ahead of time", "just in time"])
def test_a_wrong_number_of_arguments_raises_the_models_own_error(how):
    amp = ampgraph.convert(nn.Linear(8, 8), (X,), capture=how)
    with pytest.raises(TypeError, match="positional argument"):
        amp(X, X)
    assert amp.options.capture == how


def test_an_error_that_forward_raises_comes_through():
    class Checked(nn.Module):
        def forward(self, x):
            if x.shape[-1] != 8:
                raise ValueError(f"eight features, not {x.shape[-1]}")
            return x * 2

    for capture in ("auto", "just in time"):
        with pytest.raises(ValueError, match="eight features, not 5"):
            ampgraph.convert(Checked(), (X,), capture=capture)(X[:, :5])


def test_a_later_call_may_fall_back_too(recwarn):
    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            x = self.a(x)
            return x * 2 if self.training and x.sum() > 99 else x + x

    model = Trains().eval()
    amp = ampgraph.convert(model, (X,), policy=SCALED)
    assert not messages(recwarn, "just in time")
    amp.train()(X).sum().backward()
    assert len(messages(recwarn, "just in time")) == 1
    torch.testing.assert_close(model.a.bias.grad, torch.full((8,), 6.0))
    assert amp.scaler.get_scale() == 64
    again = copy.deepcopy(amp)
    torch.testing.assert_close(again(X), amp(X))
    assert again.options.just_in_time


def test_stored_low_parameters_do_not_fall_back():
    class Trains(Branching):
        def forward(self, x):
            return super().forward(x) if x.shape[0] == 2 else self.b(self.a(x))

    amp = ampgraph.convert(Trains().eval(), (X,), policy="O3", dtype=BF16)
    assert amp.stored_low
    with pytest.raises(ampgraph.CaptureError, match="could not be captured"):
        amp(X[:2])


def test_blocks_fall_back_one_by_one(recwarn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Branching())
    reference = copy.deepcopy(model)
    blocks = ampgraph.convert_blocks(model, ("0", "1"), policy=SCALED)
    model(X).sum().backward()
    reference(X).sum().backward()
    (told,) = messages(recwarn, "just in time")
    assert told.startswith("1: Branching could not be captured at ")
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.linalg.norm(p.grad - q.grad) < 0.01 * q.grad.norm()
    assert [block.options.just_in_time for block in blocks.values()] == [False, True]
    assert all(block.scaler is blocks.scaler for block in blocks.values())


def test_blocks_just_in_time():
    model = nn.Sequential(nn.Linear(8, 8), Normed())
    blocks = ampgraph.convert_blocks(model, Normed, dtype=BF16, capture="just in time")
    model(X)
    assert all(block.options.just_in_time for block in blocks.values())


LAYERS = {
    "linear": (lambda: nn.Linear(8, 8), X),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), X[None]),
    "container": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()), X),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_blocks_just_in_time_of_torchs_own_layers(layer):
    build, x = LAYERS[layer]
    torch.manual_seed(0)
    model = nn.Sequential(build(), build())
    reference = copy.deepcopy(model)
    blocks = ampgraph.convert_blocks(model, ("0", "1"), policy=SCALED, capture="just in time")
    torch.testing.assert_close(model(x), reference(x), rtol=0.01, atol=0.01)
    model(x).square().sum().backward()
    reference(x).square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.02)
    assert [len(block.graph_modules) for block in blocks.values()] == [1, 1]
    assert model(x[..., :2, :]).shape == x[..., :2, :].shape
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), model(x))
    blocks.restore()
    torch.testing.assert_close(model(x), reference(x))


def test_rules_reach_blocks_of_torchs_own_layers_just_in_time():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    policy = ampgraph.Policy(dtype=BF16, rules={"0.1": "fp32"})
    blocks = ampgraph.convert_blocks(model, "0", policy=policy, capture="just in time")
    model(X)
    rows = ampgraph.explain(blocks["0"]).nodes
    assert [row.dtype for row in rows if "linear" in row.name] == ["bfloat16", "float32"]


def test_a_block_just_in_time_takes_arguments_of_any_name():
    class Named(nn.Linear):
        def forward(self, x, *, function, model):
            return super().forward(x) * function + model

    model = nn.Sequential(Named(8, 8))
    layer = copy.deepcopy(model[0])
    ampgraph.convert_blocks(model, "0", dtype=BF16, capture="just in time")
    expected = layer(X, function=2.0, model=X)
    torch.testing.assert_close(model[0](X, function=2.0, model=X), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("capture", ["auto", "just in time"])
def test_warnings_name_the_block(capture, recwarn):
    class Returns(nn.Linear):
        def forward(self, x):
            return super().forward(x).half()

    class Opaque(nn.Linear):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    policy = ampgraph.Policy(dtype=torch.float16)
    model = nn.ModuleDict({"a": Returns(8, 8), "b": Opaque(8, 8)})
    ampgraph.convert_blocks(model, ("a", "b"), policy=policy, capture=capture)
    model["a"](X).sum().backward()
    assert messages(recwarn, "ampgraph: a: the model returns a float16 tensor")
    if capture == "just in time":
        model["b"](X)
        assert messages(recwarn, "b: Opaque ran unconverted")


def test_parameters_of_inference_mode():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    with torch.no_grad():
        with pytest.raises(ampgraph.CaptureError, match=r"0\.weight was made in inference mode"):
            ampgraph.convert(model, (X,), dtype=BF16, capture="ahead of time")
        with pytest.warns(UserWarning, match=r"0\.weight was made in inference mode.* just in time instead"):
            amp = ampgraph.convert(model, (X,), dtype=BF16)
        torch.testing.assert_close(amp(X), model(X), rtol=0.02, atol=0.02)
        assert amp.is_just_in_time
    with torch.inference_mode():
        assert not ampgraph.convert(model, (X,), dtype=BF16).is_just_in_time


class Shifts(nn.Module):
    """Seq2seq models shift their labels so; then a part follows that torch.compile refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x.new_zeros(x.shape)
        shifted[1:] = x[:-1]
        y = self.layer(shifted)
        torch._dynamo.graph_break()
        return y * len(str(refused(y.detach())))


@torch.compiler.disable
def refused(x: torch.Tensor) -> int:
    return int(x.isnan().sum())


def test_a_write_to_memory_of_the_graph_itself_is_no_effect() -> None:
    from ampgraph.runtime.compiled_source import _has_effects

    shifts = ampgraph.convert(Shifts(), dtype=torch.bfloat16)
    shifts(torch.randn(3, 4))
    assert not any(_has_effects(graph_module.graph) for graph_module in shifts.graph_modules)


class Neighbours(nn.Module):
    """Sums over neighbours in a graph, by an adjacency matrix that is an argument or a buffer."""

    def __init__(self, edges: torch.Tensor | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("own_edges", edges)

    def forward(self, x: torch.Tensor, edges: torch.Tensor | None = None) -> torch.Tensor:
        return torch.sparse.mm(self.own_edges if edges is None else edges, self.project(x))


@pytest.mark.parametrize("where", ["argument", "buffer", "unused"])
def test_sparse_tensors_fall_back_on_compiling_backends(where):
    edges, x = torch.eye(4).to_sparse(), torch.randn(4, 8)
    model = Neighbours(None if where == "argument" else edges)
    args = (x,) if where == "buffer" else (x, edges)
    if where == "unused":
        model.forward = lambda x, edges: model.project(x)
    name = "the argument 'edges'" if where == "argument" else "'own_edges'"
    with pytest.warns(UserWarning, match=f"a sparse tensor, {name}.* just in time.*backend=.eager"):
        amp = ampgraph.convert(model, args, dtype=BF16, backend="aot_eager")
    assert amp.is_just_in_time
    close(amp(*args), model(*args))
    with pytest.raises(ampgraph.CaptureError, match=name):
        ampgraph.convert(model, args, dtype=BF16, backend="aot_eager", capture="ahead of time")
    assert not ampgraph.convert(model, args, dtype=BF16, backend="eager").is_just_in_time


def test_a_sparse_argument_that_no_op_reads_is_no_reason():
    model, args = Neighbours(), (torch.randn(4, 8), torch.eye(4).to_sparse())
    model.forward = lambda x, edges: model.project(x)
    amp = ampgraph.convert(model, args, dtype=BF16, backend="aot_eager", capture="ahead of time")
    close(amp(*args), model(*args))


class Alike(Neighbours):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, (x @ x.T).to_sparse())


def test_a_sparse_result_names_its_line():
    model, x = Alike(), torch.randn(4, 8)
    with pytest.raises(ampgraph.CaptureError, match=r"a result of aten.to_sparse at .*test_capture_modes"):
        ampgraph.convert(model, (x,), dtype=BF16, backend="aot_eager", capture="ahead of time")


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.project(rows)
        return rows.to_padded_tensor(0.0) if rows.is_nested else rows


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Padded ran unconverted")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", ["nested", "dense"])
def test_nested_tensors_without_sizes_fall_back(backend, first):
    model, dense = Padded(), torch.randn(2, 5, 8)
    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    example = rows if first == "nested" else dense
    told = "the argument 'rows' has a nested tensor"
    with pytest.warns(UserWarning, match=f"{told}.* just in time"):
        (amp := ampgraph.convert(model, (example,), dtype=BF16, backend=backend))(rows)
    assert amp.is_just_in_time
    close(amp(rows), model(rows))
    with pytest.raises(ampgraph.CaptureError, match=told):
        ampgraph.convert(model, (example,), dtype=BF16, backend=backend, capture="ahead of time")(rows)
