"""Every pass against five questions, the pipeline on its own output, and the contracts of passes."""

from __future__ import annotations

import contextlib
import copy
import gc
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import GraphModule

import ampgraph
from ampgraph import OpLists, PassError, Policy, VerifyError
from ampgraph.capture import capture_program
from ampgraph.capture.unlift import unlift
from ampgraph.marks import META_KEY, CastMark, set_mark
from ampgraph.passes import (
    CleanCasts,
    InlineRegions,
    InsertCasts,
    Normalize,
    Pass,
    PlaceCasts,
    Verify,
    default_pipeline,
    is_inserted_cast,
    run_passes,
    workspace,
)
from ampgraph.passes.analysis.facts import tensors
from ampgraph.passes.pipeline import rewrite

from .captures import copied
from .cases import one_in
from .helpers import LOW, Fn, aten, close, inserted, nodes_of, random_graph, sample_inputs

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


PROGRAMS: WeakKeyDictionary[nn.Module, dict] = WeakKeyDictionary()


def captured(model: nn.Module, *args: torch.Tensor) -> GraphModule:
    """Captures a model once; each call returns a graph that may be edited."""
    known, key = PROGRAMS.setdefault(model, {}), (model.training, *map(id, args))
    if key not in known:
        known[key] = capture_program(model, args), args  # the ids stay theirs
    return unlift(copied(known[key][0]), model)[0]


def lines(graph_module: GraphModule) -> list[str]:
    return [f"{n.name} = {n.target}{n.args}{n.kwargs}" for n in graph_module.graph.nodes]


def dtypes_seen(graph_module: GraphModule, args: tuple) -> dict[str, list[torch.dtype]]:
    """Runs the graph and notes the dtypes of what each node really yields."""
    seen = {}

    class Watch(fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            values = result if isinstance(result, (list, tuple)) else (result,)
            seen[node.name] = [v.dtype for v in values if isinstance(v, torch.Tensor)]
            return result

    with torch.no_grad():
        Watch(graph_module).run(*args)
    return seen


def flat(result) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def pipeline(policy: Policy | None = None) -> tuple[Pass, ...]:
    return default_pipeline((policy or Policy()).replace(dtype=LOW), check_rules=False)


def up_to(step: type[Pass], policy: Policy | None = None) -> tuple[tuple[Pass, ...], Pass]:
    """The passes before ``step`` in the default pipeline, and ``step``."""
    passes = pipeline(policy)
    at = next(i for i, p in enumerate(passes) if isinstance(p, step))
    return passes[:at], passes[at]


def check_pass(
    step: type[Pass], model: nn.Module, *args: torch.Tensor, matches: bool = True, rel: float = 0.0
):
    """Asks five questions of a pass, after the passes that stand before it have run.

    A second run, with its analysis anew, is a no-op; ``modified`` is true to fact; a graph without a match
    stays as it is; the values are close to (``rel=0``: bitwise equal to) those before; every node's meta
    dtype is the dtype seen when run.
    """
    before, the_pass = up_to(step)
    graph_module = captured(model, *args)
    expected = flat(graph_module(*copy.deepcopy(args)))
    run_passes(graph_module, before)
    lines_before = lines(graph_module)
    result = run_passes(graph_module, [the_pass])
    assert result.graph_module is graph_module
    assert result.modified == (lines(graph_module) != lines_before)
    assert result.modified == matches
    for actual, value in zip(flat(graph_module(*copy.deepcopy(args))), expected, strict=True):
        assert torch.equal(actual, value) if rel == 0 else close(actual, value, rel) is None
    seen = dtypes_seen(graph_module, copy.deepcopy(args))
    for node in graph_module.graph.nodes:
        if node.op in ("call_function", "placeholder") and "val" in node.meta:
            assert [t.dtype for t in tensors(node)] == seen[node.name], node.name
    lines_after = lines(graph_module)
    for earlier in before:
        run_passes(graph_module, [earlier])
    assert not run_passes(graph_module, [the_pass]).modified
    assert lines(graph_module) == lines_after
    return graph_module


def regions(x):
    with torch.no_grad():
        y = torch.exp(x)
    with torch.autocast("cpu", enabled=False):
        z = x @ x.t()
    return y, z


def writes(x):
    y = x * 2
    y.add_(1).relu_()
    y[:, 0] = 3.0
    return y.type_as(x), y.to(x), y


LAYERS = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))


class UndoneWidening(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x).float())


def nothing(x):
    return x[0] + 1


INTS = torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize(("step", "model", "rel"), [
    (InlineRegions, Fn(regions), 0.0), (Normalize, Fn(writes), 0.0),
    (InsertCasts, LAYERS, 0.03), (CleanCasts, UndoneWidening(), 0.03),
], ids=lambda v: getattr(v, "__name__", ""))  # fmt: skip
def test_five_questions(step, model, rel):
    check_pass(step, model, X, rel=rel)


@pytest.mark.parametrize("step", [type(p) for p in pipeline()], ids=lambda p: p.__name__)
def test_graph_without_a_match(step):
    check_pass(step, Fn(nothing), INTS, matches=False)


@pytest.mark.parametrize("step", [type(p) for p in pipeline() if not p.edits], ids=lambda p: p.__name__)
def test_analysis_never_edits(step):
    check_pass(step, LAYERS, X, matches=False, rel=0.03)


# -- the whole pipeline ---------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(64, 5)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.norm(self.conv(x)), inplace=True).flatten(1)), -1)


MODELS = {
    "layers": (LAYERS, (X,)),
    "conv": (ConvNet(), (torch.randn(2, 3, 6, 6),)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (torch.randn(2, 3, 8),)),
    "writes": (Fn(writes), (X,)),
    "regions": (Fn(regions), (X,)),
    "undone": (UndoneWidening(), (X,)),
    "lstm": (nn.LSTM(8, 8, batch_first=True), (torch.randn(2, 3, 8),)),
    "promotions": (Fn(lambda x: torch.cat([x @ x.t(), torch.exp(x)], 1) + (x @ x.t()).sum()), (X,)),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", MODELS)
def test_pipeline_on_its_own_output_changes_nothing(name, level):
    model, args = MODELS[name]
    graph_module = captured(model, *args)
    policy = Policy(level=level, dtype=LOW)
    rewrite(graph_module, policy)
    once = lines(graph_module)
    plan = rewrite(graph_module, policy)
    assert plan.casts == ()
    assert lines(graph_module) == once


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("block", one_in(4, range(4)))
def test_pipeline_on_its_own_output_changes_nothing_random(level, block):
    for seed in range(block * 30, block * 30 + 30):
        graph_module = random_graph(seed, steps=8)
        policy = Policy(level=level, dtype=LOW)
        rewrite(graph_module, policy)
        once = lines(graph_module)
        rewrite(graph_module, policy)
        assert lines(graph_module) == once, f"seed {seed}"


def test_rewriting_again_does_not_spend_the_bound_on_casts_once_more():
    """First 192 of the 384 bytes of the autocast rule are cast; 240 more would move fewer bytes."""

    def body(low):
        rows = torch.rsqrt(low.abs() + 1)
        rows[0].copy_(rows[-1])
        sums = torch.arange(8, dtype=torch.float32) + rows
        twice = sums + sums
        thrice = sums + twice
        return sums, twice, thrice, thrice / (thrice.abs() + 1)

    low = torch.ones(4, 8, dtype=torch.bfloat16)
    amp = ampgraph.convert(Fn(body), (low,), policy=Policy(level="O2", dtype=torch.bfloat16))
    graph_module, policy = amp.graph_module, amp.policy
    assert amp.plan.cost.activation_cast_bytes == 192
    assert amp.plan.baselines["autocast"].activation_cast_bytes == 384
    assert rewrite(graph_module, policy).casts == ()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("block", one_in(4, range(4)))
def test_random_graphs_run_in_the_planned_dtypes(level, block):
    """Metadata and cost are true: dtypes as seen when run, and as many casts and bytes as the plan claims."""
    for seed in range(block * 30, block * 30 + 30):
        graph_module = random_graph(seed, steps=8)
        args = tuple(sample_inputs(graph_module))
        plan = rewrite(graph_module, Policy(level=level, dtype=LOW))
        seen = dtypes_seen(graph_module, args)
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                assert [t.dtype for t in tensors(node)] == seen[node.name], (seed, node.name)
        casts = inserted(graph_module)
        assert len(casts) <= plan.cost.casts, f"seed {seed}"
        assert len({(n.args[0], n.args[1]) for n in casts}) == len(casts) or "copy_" in graph_module.code, (
            f"seed {seed}"
        )
        assert sum(n.args[0].meta["val"].numel() * 6 for n in casts) <= plan.cost.cast_bytes, f"seed {seed}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", [
    Policy(level="O0"), Policy(ops=OpLists()), Policy(rules={"*": "fp32"}), Policy(use_fp16_guard=True),
], ids=["O0", "empty lists", "fp32 rule", "no guard"])  # fmt: skip
def test_nothing_low_means_equal_node_for_node_and_bitwise(name, policy):
    model, args = MODELS[name]
    model = copy.deepcopy(model)
    plain = captured(model, *args)
    graph_module = captured(model, *args)
    rewrite(graph_module, policy.replace(dtype=LOW), check_rules=False)
    if policy.level == "O0" or (not policy.ops.rules() and name != "regions"):  # regions are inlined
        assert lines(graph_module) == lines(plain)
    assert inserted(graph_module) == []
    for actual, expected in zip(flat(graph_module(*args)), flat(plain(*args)), strict=True):
        assert torch.equal(actual, expected)


def test_all_black_list_equals_the_source():
    ops = OpLists.default().with_black(*(f"aten.{n}" for n in ("linear", "layer_norm", "gelu", "softmax")))
    plain, graph_module = captured(LAYERS, X), captured(LAYERS, X)
    rewrite(graph_module, Policy(ops=ops, dtype=LOW))
    assert lines(graph_module) == lines(plain)
    assert torch.equal(flat(graph_module(X))[0], flat(plain(X))[0])


def test_casts_say_who_and_why_and_inherit_their_users_place():
    graph_module = captured(LAYERS, X)
    rewrite(graph_module, Policy(dtype=LOW))
    for cast in inserted(graph_module):
        assert cast.target == aten.to.dtype
        assert cast.meta[META_KEY]["inserted"] == "insert_casts"
        assert cast.meta[META_KEY]["reason"]
        user = next(iter(cast.users))
        if user.op != "output":
            assert cast.meta["nn_module_stack"] == user.meta["nn_module_stack"]
            assert cast.meta["stack_trace"] == user.meta["stack_trace"]


def test_casts_that_the_user_undoes_are_kept():
    """A user's widening and narrowing in a row stay, although they change nothing."""
    graph_module = captured(Fn(lambda x: torch.relu((x @ x.t()).to(LOW).float().to(LOW))), X)
    rewrite(graph_module, Policy(dtype=LOW))
    kept = [n.args[1] for n in nodes_of(graph_module, "to") if n not in inserted(graph_module)]
    assert kept == [LOW, torch.float32, LOW]


# -- verify ---------------------------------------------------------------------------------------------


def rewritten(model=LAYERS, *args: torch.Tensor) -> GraphModule:
    """A graph just before `Verify`, with everything that it reads."""
    graph_module = captured(model, *(args or (X,)))
    run_passes(graph_module, pipeline()[:-1])
    return graph_module


def verify_fails(graph_module: GraphModule, match: str) -> None:
    with pytest.raises(VerifyError, match=match):
        run_passes(graph_module, [Verify()])


def test_verify_accepts_a_good_graph():
    graph_module = rewritten()
    before = graph_module.code
    assert not run_passes(graph_module, [Verify()]).modified
    assert graph_module.code == before


def test_verify_sees_a_wrong_dtype():
    graph_module = rewritten()
    node = nodes_of(graph_module, "gelu")[0]
    node.meta["val"] = node.meta["val"].to(torch.float64)
    verify_fails(graph_module, r"gelu.*planned as torch\.(bfloat16|float32).*float64")


def test_verify_sees_a_removed_user_cast():
    graph_module = rewritten(Fn(lambda x: torch.relu((x @ x.t()).to(torch.float64))))
    cast = next(n for n in nodes_of(graph_module, "to") if not is_inserted_cast(n))
    cast.replace_all_uses_with(cast.args[0])
    graph_module.graph.erase_node(cast)
    verify_fails(graph_module, "user's.*removed or changed")


def test_verify_sees_a_changed_user_cast():
    graph_module = rewritten(Fn(lambda x: torch.relu((x @ x.t()).to(torch.float64))))
    cast = next(n for n in nodes_of(graph_module, "to") if not is_inserted_cast(n))
    cast.args = (cast.args[0], torch.float32)
    verify_fails(graph_module, "user's.*removed or changed")


def insert_wrong_cast(graph_module: GraphModule, node: fx.Node, dtype: torch.dtype) -> None:
    with graph_module.graph.inserting_after(node):
        cast = graph_module.graph.call_function(aten.to.dtype, (node, dtype))
    cast.meta["val"] = node.meta["val"].to(dtype)
    set_mark(cast, CastMark("a test", "", 0, False))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float64])
def test_verify_sees_a_cast_of_what_must_not_be_cast(dtype):
    other = torch.ones(4, 8).to(dtype)
    graph_module = rewritten(Fn(lambda x, o: (x @ x.t(), o)), X, other)
    node = graph_module.graph.find_nodes(op="placeholder")[1]
    insert_wrong_cast(graph_module, node, LOW)
    verify_fails(graph_module, f"casts {dtype}")


def test_verify_sees_a_cast_that_casts_nothing():
    graph_module = rewritten()
    insert_wrong_cast(graph_module, nodes_of(graph_module, "linear")[0], LOW)
    verify_fails(graph_module, "casts torch.bfloat16 to torch.bfloat16")


def test_verify_sees_a_wrong_output_dtype():
    graph_module = rewritten(Fn(lambda x: x @ x.t()))
    output = graph_module.graph.find_nodes(op="output")[0]
    output.args = ((nodes_of(graph_module, "matmul")[0],),)
    verify_fails(graph_module, "graph output")


def test_verify_sees_a_node_that_nobody_planned():
    graph_module = rewritten()
    first = nodes_of(graph_module, "gelu")[0]
    with graph_module.graph.inserting_after(first):
        extra = graph_module.graph.call_function(aten.relu.default, (first,))
    extra.meta["val"] = first.meta["val"]
    verify_fails(graph_module, "relu.*not in the plan")


def test_verify_says_where_the_node_comes_from():
    graph_module = rewritten()
    node = nodes_of(graph_module, "gelu")[0]
    node.meta["val"] = node.meta["val"].to(torch.float64)
    verify_fails(graph_module, r"\.py:\d+")


def test_verify_trusts_the_kernels_not_the_metadata():
    """Metadata that claims the planned dtype where the op yields another must not pass."""
    graph_module = rewritten(Fn(lambda x: torch.exp(x @ x.t())))
    matmul = nodes_of(graph_module, "matmul")[0]
    matmul.args = (matmul.args[0].args[0], *matmul.args[1:])
    with pytest.raises(VerifyError):
        run_passes(graph_module, [Verify()])


# -- contracts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken(Pass):
    """A pass that does what it must not, by option."""

    how: str
    name: ClassVar[str] = "broken"

    def requires(self, graph_module: GraphModule) -> None:
        if self.how == "requires":
            raise PassError(f"pass {self.name!r} needs something else.")

    def run(self, graph_module: GraphModule) -> bool:
        if self.how == "raises":
            raise KeyError("lost")
        if self.how == "leaves a dangling use":
            node = nodes_of(graph_module, "gelu")[0]
            graph_module.graph.inserting_before(node)
            other = fx.Graph().placeholder("elsewhere")
            node.args = (other,)
            return True
        return False

    def ensures(self, graph_module: GraphModule) -> None:
        if self.how == "ensures":
            raise PassError(f"pass {self.name!r} did not keep its promise.")


@dataclass(frozen=True)
class EditingAnalysis(Pass):
    silent: bool = False
    name: ClassVar[str] = "editing_analysis"
    edits: ClassVar[bool] = False

    def run(self, graph_module: GraphModule) -> bool:
        first = nodes_of(graph_module, "gelu")[0]
        with graph_module.graph.inserting_after(first):
            graph_module.graph.call_function(aten.relu.default, (first,)).meta["val"] = first.meta["val"]
        return not self.silent


@pytest.mark.parametrize("how", ["requires", "raises", "ensures", "leaves a dangling use"])
def test_broken_contracts_name_the_pass(how):
    with pytest.raises(PassError, match="'broken'"):
        run_passes(captured(LAYERS, X), [Broken(how)])


@dataclass(frozen=True)
class Writing(Pass):
    """An analysis pass that leaves something on the nodes, by option, and does not say so."""

    how: str
    name: ClassVar[str] = "writing"
    edits: ClassVar[bool] = False

    def run(self, graph_module: GraphModule) -> bool:
        node = nodes_of(graph_module, "gelu")[0]
        if self.how == "adds":
            node.meta["note"] = 1
        elif self.how == "replaces":
            node.meta["val"] = node.meta["val"].clone()
        elif self.how == "drops":
            del node.meta["val"]
        elif self.how == "argument":
            node.args = (node.args[0].args[0], *node.args[1:])
        elif self.how == "target":
            node.target = aten.relu.default
        else:
            next(iter(graph_module.graph.nodes)).prepend(node)
        return False


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("adds", "node.meta.*'note'.*'gelu'"),
        ("replaces", "node.meta.*'val'.*'gelu'"),
        ("drops", "node.meta.*'val'.*'gelu'"),
        ("argument", "edit the graph: 'gelu'"),
        ("target", "edit the graph: 'gelu'"),
        ("order", "edit the graph"),
    ],
)
def test_analysis_leaves_the_nodes_alone(how, what):
    with pytest.raises(PassError, match=f"'writing' is analysis and must not .*{what}"):
        run_passes(captured(LAYERS, X), [Writing(how)])


@pytest.mark.parametrize("silent", [False, True])
def test_analysis_that_edits_is_named(silent):
    with pytest.raises(PassError, match=r"'editing_analysis'.*must not edit"):
        run_passes(captured(LAYERS, X), [EditingAnalysis(silent)])


@dataclass(frozen=True)
class Returning(Pass):
    """Edits a node, or not, and returns something."""

    edit: bool
    result: object
    name: ClassVar[str] = "returning"

    def run(self, graph_module):
        if self.edit:
            nodes_of(graph_module, "gelu")[0].target = aten.relu.default
        return self.result


def test_a_pass_that_edits_and_does_not_say_so_is_named():
    with pytest.raises(PassError, match="'returning' edited the graph and returned False: 'gelu'"):
        run_passes(captured(LAYERS, X), [Returning(True, False)])


def test_a_pass_that_returns_no_answer_is_named():
    with pytest.raises(PassError, match=r"'returning' returned None; legal: True .*False"):
        run_passes(captured(LAYERS, X), [Returning(True, None)])


def test_equal_arguments_are_no_edit():
    @dataclass(frozen=True)
    class Assigning(Pass):
        name: ClassVar[str] = "assigning"

        def run(self, graph_module):
            for node in graph_module.graph.nodes:
                node.args = tuple(node.args)
            return False

    assert not run_passes(captured(LAYERS, X), [Assigning()]).modified


@pytest.mark.parametrize(
    "step", [InsertCasts(), PlaceCasts(Policy(dtype=LOW)), Verify()], ids=lambda p: p.name
)
def test_a_pass_out_of_order_is_named(step):
    with pytest.raises(PassError, match=step.name):
        run_passes(captured(LAYERS, X), [step])


def test_hook_sees_every_pass_in_order():
    calls = []
    graph_module = captured(LAYERS, X)
    run_passes(
        graph_module,
        pipeline(),
        lambda step, gm, changed, seconds: calls.append((step.name, changed, gm, seconds)),
    )
    assert [c[0] for c in calls] == [p.name for p in pipeline()]
    assert {name: changed for name, changed, _, _ in calls}["insert_casts"] is True
    assert all(gm is graph_module and seconds >= 0 for _, _, gm, seconds in calls)
    assert workspace(graph_module).seconds.keys() == {p.name for p in pipeline()}


def test_passes_are_frozen_values():
    assert Verify(True) == Verify(True) != Verify(False)
    assert len({*pipeline(), *pipeline()}) == len(pipeline())
    with pytest.raises(AttributeError):
        Verify().keep_io_dtypes = False


def test_plan_is_frozen_and_picklable():
    import pickle

    plan = ampgraph.convert(LAYERS, (X,), dtype=LOW).plan
    with pytest.raises(TypeError):
        plan.decisions["x"] = None
    with pytest.raises(AttributeError):
        plan.casts = ()
    again = pickle.loads(pickle.dumps(plan))
    assert dict(again.decisions) == dict(plan.decisions)
    assert again.casts == plan.casts


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_garbage_collector_pauses_and_is_as_before(was_enabled: bool, fails: bool) -> None:
    seen: list[bool] = []

    def look(*_: object) -> None:
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("stop")

    graph_module = captured(LAYERS, X)
    stopping = pytest.raises(ValueError, match="stop") if fails else contextlib.nullcontext()
    try:
        if not was_enabled:
            gc.disable()
        with stopping:
            rewrite(graph_module, Policy("O2", dtype=torch.float16), hook=look)
        assert seen
        assert not any(seen)
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
