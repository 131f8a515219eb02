"""Op lists as values, and their coverage of the installed torch."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

from ampgraph.errors import PolicyError
from ampgraph.ops import default_lists, peer_lists
from ampgraph.ops.lists import OpClass, OpLists, OpRule
from ampgraph.ops.predicates import PREDICATES

aten = torch.ops.aten

TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

PRESETS = {
    "default": OpLists.default,
    "torch": OpLists.torch,
    "paddle": OpLists.paddle,
    "paddle_od": lambda: OpLists.paddle("OD"),
    "paddle_o2": lambda: OpLists.paddle("O2"),
    "mindspore": OpLists.mindspore,
    "oneflow": OpLists.oneflow,
}
each_preset = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)


def cls(lists: OpLists, op: torch._ops.OpOverload) -> OpClass | None:
    rule = lists.lookup(op)
    return rule.cls if rule else None


def aten_ops() -> list[tuple[str, torch._ops.OpOverload]]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if namespace == "aten" and operator is not None:
            found.append((name, operator))
    return found


def has_tensor_result(op: torch._ops.OpOverload) -> bool:
    return any("Tensor" in str(result.type) for result in op._schema.returns)


def one_node(op, *args, **kwargs) -> torch.fx.Node:
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{i}") if arg is ... else arg for i, arg in enumerate(args)]
    return graph.call_function(op, tuple(inputs), kwargs)


# -- coverage and drift ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [OpLists.default, OpLists.torch])
def test_core_ops_have_a_class(preset):
    core = [op for _, op in aten_ops() if torch.Tag.core in op.tags and has_tensor_result(op)]
    assert len(core) > 150
    assert [str(op) for op in core if preset().lookup(op) is None] == []


@pytest.mark.parametrize("key", ["AutocastCUDA", "AutocastCPU"])
def test_ops_torch_autocasts_have_a_class(key):
    listed = [op for name, op in aten_ops() if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
    assert len(listed) > 100
    for preset in (OpLists.default(), OpLists.torch()):
        assert [str(op) for op in listed if preset.lookup(op) is None] == []


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="an older torch may lack some ops")
@each_preset
def test_every_row_names_an_op_of_this_torch(preset):
    rules = preset().rules()
    for cls in OpClass:
        names = {name for name, rule in rules.items() if rule.cls is cls}
        built = OpLists(**{cls.value: sorted(names)}).rules()  # refuses names that this torch does not have
        assert {name for name, rule in built.items() if rule.cls is cls} >= names


@each_preset
def test_every_row_has_a_reason_and_a_known_predicate(preset):
    for name, rule in preset().rules().items():
        assert rule.reason, name
        assert bool(rule.when) == bool(rule.otherwise), name
        assert not rule.when or rule.when in PREDICATES, name


HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": peer_lists.TORCH_LOWER_PRECISION_FP,
    "AT_FORALL_FP32": peer_lists.TORCH_FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": peer_lists.TORCH_FP32_SET_OPT_DTYPE,
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": peer_lists.TORCH_FP32_APPEND_DTYPE,
    "AT_FORALL_PROMOTE": peer_lists.TORCH_PROMOTE,
}


def header_ops(macro: str) -> set[str]:
    """The ops of one macro of torch's header."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*)", HEADER.read_text())
    assert body, f"{macro} is no longer in {HEADER}"
    full_names = re.findall(r'"(\w+\.\w+)"', body[1])
    if full_names:
        return set(full_names)
    return {".".join(filter(None, pair)) for pair in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body[1])}


@pytest.mark.skipif(not HEADER.exists(), reason="this torch ships no headers")
@pytest.mark.parametrize("macro", MACROS)
def test_torch_lists_equal_the_installed_header(macro):
    if TORCH_VERSION < (2, 13):
        pytest.skip("the lists are those of torch 2.13 and newer")
    assert set(MACROS[macro].ops.split()) == header_ops(macro)


def test_torch_lists_name_every_op_with_a_cuda_autocast_kernel():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # torch 2.11 has overloads for named dimensions still.
    names = [name for name, _ in aten_ops() if not any(word in name for word in ("imname", "names"))]
    registered = {name.removeprefix("aten::") for name in names if has_kernel(name, "AutocastCUDA")}
    ours = {name for row in peer_lists.TORCH for name in row.ops.split()}
    assert registered - ours == set()


ELEMENTWISE, PRODUCT = OpClass.GRAY, OpClass.WHITE
SUMS = {
    ("i,j->ij", (3,), (4,)): ELEMENTWISE,
    ("..., f -> ... f", (3,), (4,)): ELEMENTWISE,
    ("bi,d->bid", (2, 3), (4,)): ELEMENTWISE,
    ("i,i->i", (3,), (3,)): ELEMENTWISE,
    ("i , j", (3,), (4,)): ELEMENTWISE,
    ("i,j,k->ijk", (3,), (4,), (5,)): ELEMENTWISE,
    ("b...,b...->b...", (2, 3), (2, 3)): ELEMENTWISE,
    ("ii->", (3, 3)): ELEMENTWISE,  # a trace
    ("ii->i", (3, 3)): ELEMENTWISE,  # a diagonal
    ("ij->ji", (3, 4)): ELEMENTWISE,
    ("ij->i", (3, 4)): ELEMENTWISE,
    ("ij,i->i", (3, 4), (3,)): ELEMENTWISE,  # a sum of one operand, then a product
    ("ii,i->i", (3, 3), (3,)): ELEMENTWISE,
    ("ij,jk->ik", (3, 1), (1, 4)): ELEMENTWISE,
    ("ij,jk->ik", (3, 1), (4, 5)): ELEMENTWISE,  # the size of 1 is summed over alone
    ("ij,jk->ik", (3, 4), (4, 5)): PRODUCT,
    ("ij,jk", (3, 4), (4, 5)): PRODUCT,
    ("i,i", (3,), (3,)): PRODUCT,
    ("ij,ij->i", (3, 4), (3, 4)): PRODUCT,
    ("ij,kj->", (3, 4), (5, 4)): PRODUCT,
    ("...k,kj", (2, 3), (3, 4)): PRODUCT,
    ("...,...->", (3, 4), (4,)): PRODUCT,
}


def node_of(op: torch._ops.OpOverload, shapes: list, *rest: object, equation: str = "") -> torch.fx.Node:
    graph = torch.fx.Graph()
    operands = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for node, shape in zip(operands, shapes, strict=True):
        node.meta["val"] = torch.ones(shape)
    return graph.call_function(op, (equation, operands) if equation else (*operands, *rest))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", SUMS, ids=str)
def test_an_einsum_is_a_matrix_product_where_it_sums_over_what_operands_share(case, dtype):
    equation, *shapes = case
    node = node_of(aten.einsum.default, shapes, equation=equation)
    assert OpLists.default().classify(node, dtype)[0] is SUMS[case]
    # torch lowers it to a matrix product, of which its CPU autocast knows, just as often.
    with torch.autocast("cpu", dtype):
        lowered = torch.einsum(equation, *map(torch.ones, shapes)).dtype
    assert lowered == (dtype if SUMS[case] is PRODUCT else torch.float32)
    # Its CUDA autocast narrows the operands of all.
    assert OpLists.torch().classify(node, dtype)[0] is OpClass.WHITE


def test_a_tensordot_over_nothing_is_an_outer_product():
    default = OpLists.default()
    outer = node_of(aten.tensordot.default, [(3,), (4,)], [], [])
    assert default.classify(outer)[0] is OpClass.GRAY
    product = node_of(aten.tensordot.default, [(3, 4), (4, 5)], [1], [0])
    assert default.classify(product)[0] is OpClass.WHITE


def test_default_states_its_differences_from_torch():
    default, torchs = OpLists.default(), OpLists.torch()
    for op, ours, theirs in (
        (aten.layer_norm.default, OpClass.GRAY, OpClass.BLACK),
        (aten.upsample_nearest2d.vec, OpClass.CLEAR, OpClass.BLACK),
        (aten.prelu.default, OpClass.GRAY, OpClass.WHITE),
        (aten.tensordot.default, OpClass.WHITE, OpClass.GRAY),
        (aten.scatter_add.default, OpClass.BLACK, OpClass.GRAY),
        (aten.sin.default, OpClass.BLACK, OpClass.GRAY),
    ):
        assert (cls(default, op), cls(torchs, op)) == (ours, theirs), str(op)


# -- peers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (
            OpLists.paddle("O1"),
            {"conv2d": "white", "softmax.int": "black", "mean": "black", "add.Tensor": "gray"},
        ),
        (OpLists.paddle("O1"), {"relu": "clear", "conv3d": None, "gelu": None, "layer_norm": "black"}),
        (
            OpLists.paddle("O2"),
            {"conv2d": "white", "softmax.int": "gray", "mean": "gray", "embedding": "black"},
        ),
        (OpLists.paddle("OD"), {"conv2d": "white", "softmax.int": None, "add.Tensor": None}),
        (OpLists.mindspore(), {"linear": "white", "relu": "white", "batch_norm": "black", "gelu": "gray"}),
        (OpLists.oneflow(), {"matmul": "white", "softmax.int": "gray", "gelu": "gray", "relu": "clear"}),
        (OpLists.oneflow(), {"exp": None, "mean": None, "cat": "clear"}),
    ],
)
def test_peer_classes(lists, expected):
    for name, wanted in expected.items():
        packet, _, overload = name.partition(".")
        assert cls(lists, getattr(getattr(aten, packet), overload or "default")) == wanted, name


def test_paddle_level_is_checked():
    with pytest.raises(PolicyError, match=r"no list level 'O9'; the levels are 'OD', 'O1', 'O2'"):
        OpLists.paddle("O9")


# -- looking up --------------------------------------------------------------------------------------------


def test_overload_wins_over_packet():
    lists = OpLists(black=["aten.sum"], gray=["aten.sum.dim_IntList"])
    assert cls(lists, aten.sum.dim_IntList) is OpClass.GRAY
    assert cls(lists, aten.sum.default) is OpClass.BLACK


def test_in_place_is_found_under_its_functional_form():
    lists = OpLists(gray=["aten.add"], black=["aten.mul_"], white=["aten.mul"])
    assert cls(lists, aten.add_.Tensor) is OpClass.GRAY
    assert cls(lists, aten.mul_.Tensor) is OpClass.BLACK
    assert cls(lists, aten.mul.Tensor) is OpClass.WHITE


def test_unlisted_op_has_no_class():
    lists = OpLists(white=["aten.mm"])
    assert lists.lookup(aten.relu.default) is None
    assert lists.classify(one_node(aten.relu.default, ...)) == (None, "in no op list")


def test_a_node_that_is_no_operator_has_no_class():
    assert OpLists.default().classify(one_node(len, ...)) == (None, "not an operator")


@pytest.mark.parametrize("value", [1e10, -1e9, 1e-12, torch.finfo(torch.float32).min, 70000])
def test_scalar_that_does_not_fit_is_black(value):
    found, reason = OpLists.default().classify(one_node(aten.add.Tensor, ..., value))
    assert found is OpClass.BLACK
    assert reason.startswith(f"the constant {value:.4g} is ")


@pytest.mark.parametrize("value", [0, 0.5, -3, 65504.0, float("-inf"), float("nan"), True])
def test_scalar_that_fits_keeps_the_class(value):
    assert OpLists.default().classify(one_node(aten.add.Tensor, ..., value))[0] is OpClass.GRAY


def test_scalars_are_judged_in_the_low_dtype():
    node = one_node(aten.masked_fill.Scalar, ..., ..., -1e9)
    assert OpLists.default().classify(node)[0] is OpClass.BLACK
    assert OpLists.default().classify(node, torch.bfloat16)[0] is OpClass.CLEAR


def test_scalar_given_by_keyword_counts():
    assert OpLists.default().classify(one_node(aten.clamp.default, ..., min=1e-9))[0] is OpClass.BLACK


def test_index_put_is_black_only_when_it_accumulates():
    lists = OpLists.default()
    assert lists.classify(one_node(aten.index_put.default, ..., ..., ...))[0] is OpClass.CLEAR
    assert lists.classify(one_node(aten.index_put_.default, ..., ..., ..., True))[0] is OpClass.BLACK
    assert (
        lists.classify(one_node(aten.index_put.default, ..., ..., ..., accumulate=True))[0] is OpClass.BLACK
    )


# -- derived values ----------------------------------------------------------------------------------------


def test_moving_returns_a_new_value():
    before = OpLists.default()
    after = before.with_black("aten.gelu")
    assert cls(before, aten.gelu.default) is OpClass.GRAY
    assert cls(after, aten.gelu.default) is OpClass.BLACK
    assert before == OpLists.default()


@pytest.mark.parametrize("name", ["white", "black", "gray", "clear"])
def test_each_way_to_move(name):
    moved = getattr(OpLists.default(), f"with_{name}")("aten.exp", "aten.relu", "aten.mm")
    assert {cls(moved, op) for op in (aten.exp.default, aten.relu.default, aten.mm.default)} == {
        OpClass(name)
    }


def test_moving_a_packet_moves_its_overloads():
    assert cls(OpLists.default(), aten.max.dim) is OpClass.GRAY
    assert cls(OpLists.default().with_black("aten.max"), aten.max.dim) is OpClass.BLACK


def test_moving_an_overload_leaves_its_packet():
    moved = OpLists.default().with_white("aten.sum.dim_IntList")
    assert cls(moved, aten.sum.dim_IntList) is OpClass.WHITE
    assert cls(moved, aten.sum.default) is OpClass.BLACK


def test_moving_drops_the_predicate():
    moved = OpLists.default().with_gray("aten.add")
    assert moved.classify(one_node(aten.add.Tensor, ..., 1e10))[0] is OpClass.GRAY


def test_ops_may_be_torch_objects():
    assert OpLists(white=[aten.mm], black=[aten.softmax.int]) == OpLists(
        white=["aten.mm"], black=["aten.softmax.int"]
    )
    assert OpLists(white=["aten::mm"]) == OpLists(white=["aten.mm"])


# -- being a value -----------------------------------------------------------------------------------------

VALUES = [preset() for preset in PRESETS.values()] + [
    OpLists(),
    OpLists(white=["aten.mm"], clear=["aten.view", "aten.relu"]),
    OpLists.default().with_black("aten.gelu").with_white("aten.sum.dim_IntList", "aten.exp"),
    OpLists.paddle("O2").with_clear(aten.relu),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_repr_builds_it_again(value):
    again = eval(repr(value), {"OpLists": OpLists})
    assert again == value
    assert hash(again) == hash(value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_copies_are_equal(value):
    for twin in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert twin == value
        assert repr(twin) == repr(value)


def test_equality_is_by_value():
    one, other = OpLists(white=["aten.mm", "aten.bmm"]), OpLists(white=["aten.bmm", "aten.mm"])
    assert one == other
    assert hash(one) == hash(other)
    assert one != OpLists(black=["aten.mm", "aten.bmm"])
    assert one != "aten.mm"
    assert OpLists.default() != OpLists.torch()


def test_immutable():
    lists = OpLists.default()
    with pytest.raises(AttributeError, match="immutable"):
        lists.white = ()
    with pytest.raises(AttributeError, match="immutable"):
        del lists._rules
    with pytest.raises(TypeError):
        lists.rules()["aten.mm"] = OpRule(OpClass.BLACK, "")
    with pytest.raises(AttributeError):
        lists.lookup(aten.mm.default).cls = OpClass.BLACK


# -- validation --------------------------------------------------------------------------------------------


def test_unknown_op_is_named_with_the_nearest():
    with pytest.raises(PolicyError, match=r"torch has no op 'aten\.sotfmax'\. Did you mean 'aten\.softmax'"):
        OpLists.default().with_black("aten.sotfmax")
    with pytest.raises(
        PolicyError, match=r"torch has no op 'aten\.softmax\.intt'\. Did you mean 'aten\.softmax\.int'"
    ):
        OpLists(white=["aten.softmax.intt"])
    with pytest.raises(PolicyError, match=r"functional\.gelu'\. Did you mean 'aten\.gelu'\?"):
        OpLists(white=["torch.nn.functional.gelu"])


@pytest.mark.parametrize(
    "name", ["softmax", "", "aten", "aten.", "aten.softmax.overloads", "nowhere.op", "aten.name"]
)
def test_not_an_op(name):
    with pytest.raises(PolicyError, match="torch has no op"):
        OpLists(white=[name])


def test_not_a_name():
    with pytest.raises(PolicyError, match="an op is a string"):
        OpLists(white=[torch.relu])


def test_a_string_is_not_a_list_of_ops():
    with pytest.raises(PolicyError, match=r"white is a list of ops; write \['aten\.mm'\]"):
        OpLists(white="aten.mm")


def test_one_op_in_two_classes():
    with pytest.raises(PolicyError, match=r"op 'aten\.mm' is in two classes: white and black; keep one"):
        OpLists(white=["aten.mm"], black=[aten.mm])


def test_repeating_an_op_in_one_class_is_harmless():
    assert OpLists(white=["aten.mm", aten.mm]) == OpLists(white=["aten.mm"])


def test_presets_state_every_op_once():
    names = [name for row in default_lists.DEFAULT for name in row.ops.split()]
    assert len(names) == len(set(names))


def test_custom_op_is_legal_once_registered():
    with pytest.raises(PolicyError, match=r"torch has no op 'ampgraph_test\.fused_mlp'"):
        OpLists(white=["ampgraph_test.fused_mlp"])
    library = torch.library.Library("ampgraph_test", "DEF")
    library.define("fused_mlp(Tensor x) -> Tensor")
    lists = OpLists.default().with_white("ampgraph_test.fused_mlp")
    assert cls(lists, torch.ops.ampgraph_test.fused_mlp.default) is OpClass.WHITE
    library._destroy()


@pytest.mark.parametrize("preset", [OpLists.default, OpLists.torch, OpLists.mindspore, OpLists.oneflow])
def test_a_preset_is_built_once(preset):
    """Its rows are thousands, and each ``Policy()`` asks for it; what is derived leaves it as it was."""
    before = dict(preset().rules())
    assert preset().with_black("aten.mm") != preset()
    assert preset() is preset()
    assert preset().rules() == before
