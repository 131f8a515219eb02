"""Every way out of ampgraph and back, each round trip checked by its numbers."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import shutil

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import ampgraph
from ampgraph import CaptureError, PolicyError
from ampgraph.marks import META_KEY

from .exported_models import Attention, models

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
MODELS = models()
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def built(name):
    torch.manual_seed(0)
    cls, args, kwargs = MODELS[name]
    return cls().eval(), args, kwargs


@functools.cache
def exported(name, level="O1", dtype=BF16, **options):
    """Returns the program, its inputs and what it computes; shared by the tests, which change none of it."""
    model, args, kwargs = built(name)
    program = ampgraph.export(model, args, kwargs, policy=level, dtype=dtype, **options)
    return program, args, kwargs, program.module()(*args, **kwargs)


def equal(actual, expected):
    found, wanted = tree_leaves(actual), tree_leaves(expected)
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in wanted]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def near(actual, expected, rel):
    found, wanted = tree_leaves(actual), tree_leaves(expected)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= rel * b.norm()


def casts(program):
    return sum(
        n.target is torch.ops.aten.to.dtype for m in program.graph_module.modules() for n in m.graph.nodes
    )


# -- exported programs ------------------------------------------------------------------------------------


@EVERY_MODEL
@LEVELS
def test_export_computes_what_convert_computes(name, level):
    model, args, kwargs = built(name)
    *_, out = exported(name, level)
    assert not torch.equal(tree_leaves(out)[0], tree_leaves(model(*args, **kwargs))[0])
    equal(ampgraph.convert(model, args, kwargs, policy=level, dtype=BF16)(*args, **kwargs), out)
    plain = torch.export.export(model, args, kwargs, strict=False)
    equal(ampgraph.convert(plain, policy=level, dtype=BF16).module()(*args, **kwargs), out)


@EVERY_MODEL
@LEVELS
def test_saved_and_loaded(name, level):
    program, args, kwargs, out = exported(name, level)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert casts(loaded) == casts(program)
    equal(loaded.module()(*args, **kwargs), out)


@EVERY_MODEL
def test_decomposed(name):
    """``no_grad`` in the model is a sub-graph of the program, as torch's own passes expect."""
    program, args, kwargs, out = exported(name)
    # Attention and the LSTM become other kernels, which round elsewhere.
    compare = functools.partial(near, rel=0.02) if name in ("attention", "recurrent") else equal
    compare(program.run_decompositions().module()(*args, **kwargs), out)


@EVERY_MODEL
def test_copied(name):
    program, args, kwargs, out = exported(name)
    equal(copy.deepcopy(program).module()(*args, **kwargs), out)


@EVERY_MODEL
@LEVELS
def test_converted_again_changes_nothing(name, level):
    program, args, kwargs, out = exported(name, level)
    again = ampgraph.convert(program, policy=level, dtype=BF16)
    assert len(again.graph.nodes) == len(program.graph.nodes)
    assert casts(again) == casts(program)
    equal(again.module()(*args, **kwargs), out)


@EVERY_MODEL
def test_module_of_a_program_is_a_model_to_convert(name):
    program, args, kwargs, out = exported(name)
    equal(ampgraph.convert(program.module(), args, kwargs, dtype=BF16)(*args, **kwargs), out)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "recurrent"])
def test_compiled(name):
    """Not the LSTM: AOTAutograd cannot train it on a CPU, in whatever dtype but float16."""
    program, args, kwargs, out = exported(name)
    equal(torch.compile(program.module(), backend="aot_eager")(*args, **kwargs), out)


@pytest.mark.parametrize("strict", [False, True])
def test_guards_survive_an_export_by_torch(strict):
    """A guard in a model that the user exports is found when the program is converted."""

    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            with ampgraph.fp32_guard():
                x = self.layer(x)
            return self.layer(x)

    program = torch.export.export(Guarded(), (torch.ones(2, 8),), strict=strict)
    program = ampgraph.convert(program, dtype=BF16)
    linears = [n for n in program.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert [n.meta["val"].dtype for n in linears] == [FP32, BF16]


@LEVELS
def test_converted_model_is_exported_under_its_own_policy(level):
    model, args, _ = built("attention")
    amp = ampgraph.convert(model, args, policy=level, dtype=BF16)
    equal(ampgraph.export(amp, args).module()(*args), amp(*args))
    equal(torch.export.export(amp, args, strict=False).module()(*args), amp(*args))


def test_what_cannot_be_exported_says_why():
    model, args, _ = built("attention")
    low = ampgraph.convert(copy.deepcopy(model), args, policy="O3", dtype=BF16)
    with pytest.raises(PolicyError, match="O3 has stored 4 parameters of Attention"):
        ampgraph.export(low, args)
    late = ampgraph.convert(model, dtype=BF16)
    late(*args)
    with pytest.raises(CaptureError, match=r"just in time.*ampgraph.export"):
        torch.export.export(late, args, strict=False)


@pytest.mark.parametrize("size", [Dim("rows", max=64), Dim.AUTO, Dim.DYNAMIC])
def test_dynamic_sizes_of_a_converted_model_need_ampgraphs_export(size):
    """``torch.export`` would write the numbers of this example into the graph."""
    x = torch.randn(4, 8)
    amp = ampgraph.convert(nn.Linear(8, 8), (x,), dtype=BF16)
    with pytest.raises(CaptureError, match=r"Linear dynamic.*ampgraph\.export\(model, args, dynamic"):
        torch.export.export(amp, (x.clone(),), dynamic_shapes=({0: size},))
    program = ampgraph.export(amp, (x,), dynamic_shapes=({0: size},))
    assert program.module()(torch.randn(7, 8)).shape == (7, 8)


def test_a_trace_of_other_sizes_than_a_converted_model_has_seen():
    amp = ampgraph.convert(nn.Linear(8, 8), (torch.randn(4, 8),), dtype=BF16)
    with pytest.raises(CaptureError, match=r"no graph for these arguments.*inside another capture or trace"):
        torch.jit.trace(nn.Sequential(amp), (torch.randn(2, 3, 8),))


# -- other runtimes ---------------------------------------------------------------------------------------


@EVERY_MODEL
@LEVELS
def test_explicit_casts_change_no_value(name, level):
    *_, out = exported(name, level, FP16)
    explicit = exported(name, level, FP16, explicit_casts=True)
    equal(explicit[3], out)
    for module in explicit[0].graph_module.modules():
        for node in module.graph.nodes:
            operands = [n.meta.get("val") for n in node.all_input_nodes if node.op == "call_function"]
            found = {t.dtype for t in operands if isinstance(t, torch.Tensor) and t.dim()}
            assert not {FP16, FP32} <= found or len(tree_leaves(node.meta["val"])) > 1, node


@pytest.fixture(scope="module")
def one_registry():
    """Torch fills the table of its ONNX functions at each export, in half a second; none here changes it."""
    registry = pytest.importorskip("torch.onnx._internal.exporter._registration").ONNXRegistry
    once = staticmethod(functools.cache(registry.from_torchlib))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "from_torchlib", once)
        yield


@EVERY_MODEL
@LEVELS
@pytest.mark.usefixtures("one_registry")
def test_onnx(name, level, tmp_path):
    """Float16: onnxruntime's CPU kernels know no bfloat16."""
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    program, args, kwargs, out = exported(name, level, FP16, explicit_casts=True)
    path = tmp_path / "model.onnx"
    torch.onnx.export(copy.deepcopy(program), args, kwargs=kwargs, dynamo=True, verbose=False).save(path)
    graph = onnx.load(path).graph
    made = {a.i for node in graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    assert onnx.TensorProto.FLOAT16 in made | {tensor.data_type for tensor in graph.initializer}
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    given = dict(zip(names, [t.numpy() for t in tree_leaves((args, kwargs))], strict=True))
    found = [torch.from_numpy(array) for array in session.run(None, given)]
    assert [t.dtype for t in found] == [t.dtype for t in tree_leaves(out)]
    near(found, out, 0.01)


@pytest.mark.exhaustive  # compiles C++
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++")
def test_aot_inductor_package(tmp_path):
    program, args, _, out = exported("attention")
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    near(torch._inductor.aoti_load_package(path)(*args), out, 0.01)


# -- state and objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "tied"])
def test_export_at_o3_holds_low_parameters(name):
    model, args, kwargs = built(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    *_, expected = exported(name, "O1")
    program, args, kwargs, out = exported(name, "O3")
    near(out, expected, 0.03)
    low = {n for n, p in program.state_dict.items() if p.dtype == BF16}
    assert low == {"attention": {"qkv.weight", "qkv.bias", "out.weight", "out.bias"}, "tied": set()}[name]
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    read = [placeholders[n] for n, of in program.graph_signature.inputs_to_parameters.items() if of in low]
    assert not [u for n in read for u in n.users if u.target is torch.ops.aten.to.dtype]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    equal(torch.export.load(file).module()(*args, **kwargs), out)
    model.train()
    kept = ampgraph.export(model, args, kwargs, policy="O3", dtype=BF16)
    assert all(p.dtype == FP32 for p in kept.state_dict.values())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_state_loads_into_the_unconverted_model_and_back(level):
    model, args, _ = built("attention")
    expected = model(*args)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    amp = ampgraph.convert(model, args, policy=level, dtype=BF16)
    file = io.BytesIO()
    torch.save(amp.state_dict(), file)
    file.seek(0)
    plain = Attention().eval()
    plain.load_state_dict(torch.load(file, weights_only=True))
    near(plain(*args), expected, 0.02 if level == "O3" else 0)
    fresh = ampgraph.convert(Attention().eval(), args, policy=level, dtype=BF16)
    fresh.load_state_dict(state)
    equal(fresh(*args), amp(*args))


def test_source_is_the_model_unconverted():
    model, args, _ = built("attention")
    expected = model(*args)
    amp = ampgraph.convert(model, args, dtype=BF16)
    assert amp.source is model
    equal(amp.source(*args), expected)
    assert not torch.equal(amp(*args), expected)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda amp: pickle.loads(pickle.dumps(amp))])
@pytest.mark.parametrize("how", ["ahead of time", "just in time"])
def test_copies_are_converted_models_of_their_own(way, how):
    model, args, _ = built("attention")
    amp = ampgraph.convert(model, args if how == "ahead of time" else None, policy="O2", dtype=BF16)
    copied = way(amp)
    out = amp(*args).detach()
    equal(copied(*args).detach(), out)
    with torch.no_grad():
        copied.out.weight.zero_()
    equal(amp(*args).detach(), out)
    assert not torch.equal(copied(*args), out)


@pytest.mark.parametrize("how", ["ahead of time", "just in time"])
def test_converting_leaves_no_mark_on_the_model(how, monkeypatch):
    """torch.compile marks what it returns, which marks the model; Lightning adds all arguments to that."""
    compile_ = torch.compile

    def marking(model, **kwargs):
        compiled = compile_(model, **kwargs)
        compiled._compile_kwargs = kwargs
        return compiled

    monkeypatch.setattr(torch, "compile", marking)
    model, args, _ = built("attention")
    before = set(vars(model))
    amp = ampgraph.convert(model, args if how == "ahead of time" else None, dtype=BF16)
    out = amp(*args)
    assert set(vars(model)) == before
    equal(pickle.loads(pickle.dumps(amp))(*args), out)


# -- what other tools do with a module ----------------------------------------------------------------------


@LEVELS
@pytest.mark.parametrize(
    "way",
    [
        lambda amp, args: torch.compile(amp, backend="aot_eager"),
        lambda amp, args: torch.export.export(amp, args, strict=True).module(),
        lambda amp, args: torch.export.export(amp, args, strict=False).module(),
        lambda amp, args: torch.jit.trace(amp, args),
        lambda amp, args: nn.DataParallel(amp),
    ],
    ids=["torch.compile", "strict export", "export", "torch.jit.trace", "DataParallel"],
)
def test_converted_model_inside_other_tools(way, level):
    model, args, _ = built("attention")
    amp = ampgraph.convert(model, args, policy=level, dtype=BF16)
    out = amp(*args)
    assert not torch.equal(out, model(*args))
    near(way(amp, args)(*args), out, 1e-6)


def test_torch_script_says_what_to_do():
    model, args, _ = built("attention")
    with pytest.raises(CaptureError, match=r"ampgraph\.export"):
        torch.jit.script(ampgraph.convert(model, args, dtype=BF16))


@pytest.mark.parametrize("how", ["ahead of time", "just in time"])
def test_looking_through_all_attributes_raises_nothing(how):
    """As debuggers and ``torch.jit.trace`` do; asked for by name, what is not there yet says why."""
    model, args, _ = built("attention")
    amp = ampgraph.convert(model, args if how == "ahead of time" else None, dtype=BF16)
    names = {name for name, _ in inspect.getmembers(amp)}
    assert "scaler" in names
    assert "backward_graph" not in names
    assert not hasattr(amp, "backward_graph")
    with pytest.raises(ampgraph.AmpGraphError, match=r"keeps no backward graph|is not captured yet"):
        _ = amp.backward_graph


def test_loss_scaling_goes_on_under_an_outer_torch_compile():
    """The outer one leaves the converted model alone, backend, low copies and all."""
    model, args, _ = built("attention")
    amp = ampgraph.convert(model, args, policy="O2", dtype=FP16, backend="aot_eager")
    torch.compile(amp, backend="aot_eager")(*args).square().mean().backward()
    roles = {n.meta[META_KEY]["boundary"] for n in amp.backward_graph.graph.nodes if META_KEY in n.meta}
    assert {"scale", "unscale", "finite check"} <= roles
    reference = built("attention")[0]
    reference(*args).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        near(mine.grad, theirs.grad, 0.01)
