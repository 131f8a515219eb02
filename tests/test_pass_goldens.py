"""One golden for each pass: a small graph, the pass alone, and the graph or the findings after it.

``EXPECTTEST_ACCEPT=1 pytest tests/test_pass_goldens.py`` writes what the passes give now into this file.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.fx import GraphModule

import ampgraph.passes
from ampgraph import Policy, VerifyError
from ampgraph.capture import capture_program
from ampgraph.capture.unlift import unlift
from ampgraph.ops import kernels
from ampgraph.passes import (
    ChooseGradients,
    ChooseSaved,
    ClassifyOps,
    CleanCasts,
    FoldMasks,
    InlineRegions,
    InsertCasts,
    KeepRead,
    LayOutMasks,
    Normalize,
    Pass,
    PlaceCasts,
    PropagatePrecision,
    RemoveCasts,
    SaveNorms,
    SaveSoftmax,
    Verify,
    WidenGradients,
    default_pipeline,
    run_passes,
    workspace,
)
from ampgraph.passes.explicit_casts import ExplicitCasts
from ampgraph.passes.inline_transforms import InlineTransforms
from ampgraph.passes.read_shadows import ReadShadows
from ampgraph.passes.read_stored import ReadStored
from ampgraph.passes.scale_loss import ScaleLoss

from .helpers import LOW, Fn, GraphBuilder, aten, inserted, op_chain, type_name

O1, O2 = Policy(dtype=LOW), Policy("O2", dtype=LOW)
KEPT_LOW = O1.replace(keep_io_dtypes=False)


def after(graph_module: GraphModule, *passes: Pass) -> GraphModule:
    run_passes(graph_module, passes)
    return graph_module


def analysis(policy: Policy) -> tuple[Pass, ...]:
    return ClassifyOps(policy), PropagatePrecision(policy, check_rules=False), PlaceCasts(policy)


def change(graph_module: GraphModule, step: Pass) -> str:
    """Returns the graph before and after one pass that edits it."""
    before = op_chain(graph_module)
    assert run_passes(graph_module, [step]).modified
    return f"{before}\n--- {step.name}\n{op_chain(graph_module)}"


def findings(graph_module: GraphModule, lines: list[str]) -> str:
    return "\n".join([op_chain(graph_module), "---", *lines])


def mlp() -> GraphModule:
    """A product, a gray op and a black one."""
    build = GraphBuilder()
    x, weight = build.input(4, 8), build.weight(8, 8)
    hidden = build.call(aten.relu.default, build.call(aten.linear.default, x, weight))
    return build.finish(build.call(aten.softmax.int, hidden, -1))


def captured(model: nn.Module, *args: torch.Tensor) -> GraphModule:
    return unlift(capture_program(model, args), model)[0]


def test_every_pass_has_its_golden() -> None:
    folder = Path(next(iter(ampgraph.passes.__path__)))
    parsed = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    named = {
        node.name
        for tree in parsed
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Pass" in {getattr(base, "id", "") for base in node.bases}
    }
    assert len(named) >= 14
    missing = sorted(named - globals().keys())
    assert not missing, f"add a golden of {', '.join(missing)} to this file"


def test_the_table_of_passes_is_the_pipeline() -> None:
    page = (Path(__file__).parent.parent / "docs/architecture.md").read_text()
    table = page.partition("## Decide, then edit")[2].partition("\n\n`run_passes`")[0]
    rows = re.findall(r"^\| `(\w+)` \|.* (yes|no) \|$", table, re.MULTILINE)
    passes = default_pipeline(Policy("O1", dtype=torch.bfloat16))
    assert rows == [(step.name, "yes" if step.edits else "no") for step in passes]


def test_normalize() -> None:
    """An op in place with one reader becomes functional; memory written through a view gets a clone."""
    build = GraphBuilder()
    x = build.input(4, 8)
    added = build.call(aten.add_.Tensor, build.call(aten.mul.Tensor, x, 2), 1)
    memory = build.call(aten.exp.default, added)
    build.call(aten.fill_.Scalar, build.call(aten.select.int, memory, 1, 0), 3.0)
    assert_expected_inline(
        change(build.finish(memory), Normalize()),
        """\
x0 f32
mul_tensor = mul.Tensor(x0, 2) f32
add__tensor = add_.Tensor(mul_tensor, 1) f32
exp_default = exp(add__tensor) f32
select_int = select.int(exp_default, 1, 0) f32
fill__scalar = fill_.Scalar(select_int, 3.0) f32
return [exp_default]
--- normalize
x0 f32
mul_tensor = mul.Tensor(x0, 2) f32
add__tensor = add.Tensor(mul_tensor, 1) f32
exp_default = exp(add__tensor) f32
clone_default = clone(exp_default) f32
select_int = select.int(clone_default, 1, 0) f32
fill__scalar = fill_.Scalar(select_int, 3.0) f32
return [clone_default]""",
    )


def test_fold_masks() -> None:
    """A mask of numbers that hides the future becomes a flag, and nothing of it stays; an input stays."""
    build = GraphBuilder()
    x, given = build.input(1, 4, 8), build.input(4, 4)
    past = build.call(aten.tril.default, build.call(aten.ones.default, [4, 4], dtype=torch.bool))
    once = build.call(aten.scaled_dot_product_attention.default, x, x, x, past)
    again = build.call(aten.scaled_dot_product_attention.default, x, x, x, given)
    assert_expected_inline(
        change(build.finish(build.call(aten.add.Tensor, once, again)), FoldMasks()),
        """\
x1 f32
x0 f32
ones_default = ones([4, 4], dtype=bool) bool
tril_default = tril(ones_default) bool
scaled_dot_product_attention_default = scaled_dot_product_attention(x0, x0, x0, tril_default) f32
scaled_dot_product_attention_default_1 = scaled_dot_product_attention(x0, x0, x0, x1) f32
add_tensor = add.Tensor(scaled_dot_product_attention_default, scaled_dot_product_attention_default_1) f32
return [add_tensor]
--- fold_masks
x1 f32
x0 f32
scaled_dot_product_attention_default = scaled_dot_product_attention(x0, x0, x0, None, is_causal=True) f32
scaled_dot_product_attention_default_1 = scaled_dot_product_attention(x0, x0, x0, x1) f32
add_tensor = add.Tensor(scaled_dot_product_attention_default, scaled_dot_product_attention_default_1) f32
return [add_tensor]""",
    )


def test_lay_out_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for a GPU get a mask with contiguous rows; two calls share the copy."""
    monkeypatch.setattr(kernels, "wants_contiguous_rows", lambda device: True)
    build = GraphBuilder()
    x, mask = build.input(1, 4, 8), build.input(1, 4, 1)
    wide = build.call(aten.expand.default, mask, [1, 4, 4])
    once = build.call(aten.scaled_dot_product_attention.default, x, x, x, wide)
    again = build.call(aten.scaled_dot_product_attention.default, x, x, x, wide)
    assert_expected_inline(
        change(build.finish(build.call(aten.add.Tensor, once, again)), LayOutMasks()),
        """\
x1 f32
x0 f32
expand_default = expand(x1, [1, 4, 4]) f32
scaled_dot_product_attention_default = scaled_dot_product_attention(x0, x0, x0, expand_default) f32
scaled_dot_product_attention_default_1 = scaled_dot_product_attention(x0, x0, x0, expand_default) f32
add_tensor = add.Tensor(scaled_dot_product_attention_default, scaled_dot_product_attention_default_1) f32
return [add_tensor]
--- lay_out_masks
x1 f32
x0 f32
expand_default = expand(x1, [1, 4, 4]) f32
contiguous_default = contiguous(expand_default) f32
scaled_dot_product_attention_default = scaled_dot_product_attention(x0, x0, x0, contiguous_default) f32
scaled_dot_product_attention_default_1 = scaled_dot_product_attention(x0, x0, x0, contiguous_default) f32
add_tensor = add.Tensor(scaled_dot_product_attention_default, scaled_dot_product_attention_default_1) f32
return [add_tensor]""",
    )


def test_inline_regions() -> None:
    """A grad-mode region becomes a pair of calls, an autocast region a guard on its nodes."""

    def regions(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.exp()
        with torch.autocast("cpu", enabled=False):
            return x @ y

    assert_expected_inline(
        change(captured(Fn(regions), torch.ones(4, 4)), InlineRegions(O1)),
        """\
args_0 f32
submod_2
exp = wrap_with_set_grad_enabled(False, submod_2, args_0) f32
getitem = getitem(exp, 0) f32
submod_3
matmul = wrap_with_autocast(cpu, bf16, False, False, submod_3, args_0, getitem) f32
getitem_1 = getitem(matmul, 0) f32
return [getitem_1]
--- inline_regions
args_0 f32
is_grad_enabled = is_grad_enabled()
_set_grad_enabled = _set_grad_enabled(False)
exp_1 = exp(args_0) f32
_set_grad_enabled_1 = _set_grad_enabled(is_grad_enabled)
matmul_1 = matmul(args_0, exp_1) f32  guard=fp32
return [matmul_1]""",
    )


def test_inline_transforms() -> None:
    """The op of one sample becomes the op of the batch."""
    graph_module = captured(Fn(lambda x, y: torch.vmap(torch.dot)(x, y)), torch.ones(3, 4), torch.ones(3, 4))
    assert_expected_inline(
        change(graph_module, InlineTransforms()),
        """\
args_0 f32
args_1 f32
lazy_load_decompositions = lazy_load_decompositions()
_vmap_increment_nesting = _vmap_increment_nesting(3, error)
_add_batch_dim = _add_batch_dim(args_0, 0, 1) f32
_add_batch_dim_1 = _add_batch_dim(args_1, 0, 1) f32
dot = dot(_add_batch_dim, _add_batch_dim_1) f32
_remove_batch_dim = _remove_batch_dim(dot, 1, 3, 0) f32
_vmap_decrement_nesting = _vmap_decrement_nesting()
return [_remove_batch_dim]
--- inline_transforms
args_0 f32
args_1 f32
unsqueeze = unsqueeze(args_1, -1) f32
unsqueeze_1 = unsqueeze(args_0, -2) f32
expand = expand(unsqueeze_1, [3, 1, 4]) f32
view = view(expand, [3, 1, 4]) f32
expand_1 = expand(unsqueeze, [3, 4, 1]) f32
view_1 = view(expand_1, [3, 4, 1]) f32
bmm = bmm(view, view_1) f32
_unsafe_view = _unsafe_view(bmm, [3, 1, 1]) f32
squeeze = squeeze.dim(_unsafe_view, -1) f32
squeeze_1 = squeeze.dim(squeeze, -1) f32
return [squeeze_1]""",
    )


def test_classify() -> None:
    graph_module = after(mlp(), ClassifyOps(O1))
    found = workspace(graph_module).facts
    lines = [
        f"{node.name}: {fact.op_class or 'no class'}"
        + "".join(f"; {operand.tensor.name} {operand.rule.name}" for operand in fact.operands)
        for node, fact in found.items()
    ]
    assert_expected_inline(
        findings(graph_module, lines),
        """\
w1 f32
x0 f32
linear_default = linear(x0, w1) f32
relu_default = relu(linear_default) f32
softmax_int = softmax.int(relu_default, -1) f32
return [softmax_int]
---
w1: no class
x0: no class
linear_default: white; x0 NODE_DTYPE; w1 NODE_DTYPE
relu_default: clear; linear_default NODE_DTYPE
softmax_int: black; relu_default DTYPE_ARG
output: no class; softmax_int SOURCE_DTYPE""",
    )


def test_propagate() -> None:
    graph_module = after(mlp(), *analysis(O1)[:2])
    lines = [
        f"{node.name}: {'free' if variable.pinned is None else variable.pinned.name} by {variable.by}"
        for node, variable in workspace(graph_module).problem.variables.items()
    ]
    assert_expected_inline(
        findings(graph_module, lines),
        """\
w1 f32
x0 f32
linear_default = linear(x0, w1) f32
relu_default = relu(linear_default) f32
softmax_int = softmax.int(relu_default, -1) f32
return [softmax_int]
---
w1: FP32 by source
x0: FP32 by source
linear_default: LOW by list
relu_default: free by placement
softmax_int: FP32 by list""",
    )


def test_place() -> None:
    graph_module = after(mlp(), *analysis(O1))
    plan = workspace(graph_module).plan
    lines = [f"{n}: {type_name(d.dtype) if d.dtype else '-'} by {d.by}" for n, d in plan.decisions.items()]
    lines += [f"cast {c.tensor} to {type_name(c.dst)}: {c.bytes} bytes" for c in plan.casts]
    lines += [f"{node} sets {argument}" for node, argument in plan.dtype_args.items()]
    assert plan.optimal
    assert_expected_inline(
        findings(graph_module, lines),
        """\
w1 f32
x0 f32
linear_default = linear(x0, w1) f32
relu_default = relu(linear_default) f32
softmax_int = softmax.int(relu_default, -1) f32
return [softmax_int]
---
w1: f32 by source
x0: f32 by source
linear_default: bf16 by list
relu_default: bf16 by placement
softmax_int: f32 by list
output: - by source
cast x0 to bf16: 192 bytes
cast w1 to bf16: 384 bytes
softmax_int sets dtype""",
    )


def norm() -> GraphModule:
    """A sum, its layer norm, and a product that reads it low."""
    build = GraphBuilder()
    x, weight, scale = build.input(4, 8), build.weight(8, 8), build.weight(8)
    total = build.call(aten.add.Tensor, x, build.call(aten.linear.default, x, weight))
    normed = build.call(aten.layer_norm.default, total, [8], scale)
    return build.finish(build.call(aten.linear.default, normed, weight))


def test_choose_saved() -> None:
    policy = O1.replace(objective="fused")
    graph_module = after(norm(), *analysis(policy), ChooseSaved(policy))
    plan = workspace(graph_module).plan
    lines = [f"saved low: {', '.join(plan.saved_low)}", *plan["layer_norm_default"].reason.split("; ")]
    assert_expected_inline(
        findings(graph_module, lines),
        """\
w2 f32
w1 f32
x0 f32
linear_default = linear(x0, w1) f32
add_tensor = add.Tensor(x0, linear_default) f32
layer_norm_default = layer_norm(add_tensor, [8], w2) f32
linear_default_1 = linear(layer_norm_default, w1) f32
return [linear_default_1]
---
saved low: layer_norm_default
gray: follows 'add_tensor', which is float32
its backward reads the normalized values in bfloat16""",
    )


def attention() -> GraphModule:
    """Scores, a mask, their softmax without dropout, and a product that reads it low."""
    build = GraphBuilder()
    x, weight, mask = build.input(4, 8), build.weight(8, 8), build.weight(4, 4)
    q = build.call(aten.linear.default, x, weight)
    scores = build.call(aten.matmul.default, q, build.call(aten.t.default, q))
    shares = build.call(aten.softmax.int, build.call(aten.add.Tensor, scores, mask), -1)
    shares = build.call(aten.dropout.default, shares, 0.0, True)
    return build.finish(build.call(aten.matmul.default, shares, q))


def test_choose_saved_softmax() -> None:
    policy = O1.replace(objective="fused")
    graph_module = after(attention(), *analysis(policy), ChooseSaved(policy))
    plan = workspace(graph_module).plan
    lines = [f"saved softmax: {', '.join(plan.saved_softmax)}", *plan["softmax_int"].reason.split("; ")]
    assert_expected_inline(
        findings(graph_module, lines),
        """\
w2 f32
w1 f32
x0 f32
linear_default = linear(x0, w1) f32
t_default = t(linear_default) f32
matmul_default = matmul(linear_default, t_default) f32
add_tensor = add.Tensor(matmul_default, w2) f32
softmax_int = softmax.int(add_tensor, -1) f32
dropout_default = dropout(softmax_int, 0.0, True) f32
matmul_default_1 = matmul(dropout_default, linear_default) f32
return [matmul_default_1]
---
saved softmax: softmax_int
black: probabilities: small ones vanish in low
the kernel reads low and writes float32
its backward reads the probabilities in bfloat16""",
    )


def products(device: str = "cpu") -> GraphModule:
    """Two products; a sum reads the weight of the second one too."""
    build = GraphBuilder(device)
    x, first, second = build.input(4, 8), build.weight(8, 8), build.weight(8, 8)
    result = build.call(aten.mm.default, build.call(aten.mm.default, x, first), second)
    return build.finish(build.call(aten.add.Tensor, result, build.call(aten.select.int, second, 0, 0)))


def test_choose_gradients() -> None:
    """The weight that a sum reads too keeps its cast."""
    policy = O1.replace(objective="fused")
    graph_module = after(products("cuda"), *analysis(policy), ChooseGradients(policy))
    plan = workspace(graph_module).plan
    lines = [f"wide: {', '.join(plan.wide_gradients)}", *plan["mm_default"].reason.split("; ")]
    assert_expected_inline(
        findings(graph_module, lines),
        """\
w2 f32
w1 f32
x0 f32
mm_default = mm(x0, w1) f32
mm_default_1 = mm(mm_default, w2) f32
select_int = select.int(w2, 0, 0) f32
add_tensor = add.Tensor(mm_default_1, select_int) f32
return [add_tensor]
---
wide: mm_default
white: matrix product: fp32 inside, fastest in low
its kernel gives the gradient of the weight in float32""",
    )


def test_widen_gradients() -> None:
    """The product runs without gradients, on flat rows; the node that has its name gives the gradients."""
    graph_module = after(products(), *analysis(O1), InsertCasts())
    assert_expected_inline(
        change(graph_module, WidenGradients(("mm_default",))),
        """\
w2 f32
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
mm_default = mm(to_dtype, to_dtype_1) bf16
to_dtype_2 = to.dtype(w2, bf16) bf16
mm_default_1 = mm(mm_default, to_dtype_2) bf16
select_int = select.int(w2, 0, 0) f32
add_tensor = add.Tensor(mm_default_1, select_int) f32
return [add_tensor]
--- widen_gradients
w2 f32
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
detach_default = detach(to_dtype) bf16
detach_default_1 = detach(to_dtype_1) bf16
reshape_default = reshape(detach_default, [-1, 8]) bf16
mm_default_2 = mm(reshape_default, detach_default_1) bf16
mm_default = weight_gradient(to_dtype, w1, None, mm_default_2, reshape_default, detach_default_1, False) bf16
to_dtype_2 = to.dtype(w2, bf16) bf16
mm_default_1 = mm(mm_default, to_dtype_2) bf16
select_int = select.int(w2, 0, 0) f32
add_tensor = add.Tensor(mm_default_1, select_int) f32
return [add_tensor]""",
    )


def test_save_softmax() -> None:
    """The softmax runs without gradients; the op that has its name gives the gradient."""
    graph_module = after(attention(), *analysis(O1), InsertCasts())
    assert_expected_inline(
        change(graph_module, SaveSoftmax(("softmax_int",), LOW)),
        """\
w2 f32
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
t_default = t(linear_default) bf16
matmul_default = matmul(linear_default, t_default) bf16
add_tensor = add.Tensor(matmul_default, w2) f32
softmax_int = softmax.int(add_tensor, -1) f32
dropout_default = dropout(softmax_int, 0.0, True) f32
to_dtype_2 = to.dtype(dropout_default, bf16) bf16
matmul_default_1 = matmul(to_dtype_2, linear_default) bf16
to_dtype_3 = to.dtype(matmul_default_1, f32) f32
return [to_dtype_3]
--- save_softmax
w2 f32
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
t_default = t(linear_default) bf16
matmul_default = matmul(linear_default, t_default) bf16
add_tensor = add.Tensor(matmul_default, w2) f32
detach_default = detach(add_tensor) f32
softmax_int_1 = softmax.int(detach_default, -1) f32
softmax_int = softmax_gradient(add_tensor, softmax_int_1, -1, bf16) f32
dropout_default = dropout(softmax_int, 0.0, True) f32
to_dtype_2 = to.dtype(dropout_default, bf16) bf16
matmul_default_1 = matmul(to_dtype_2, linear_default) bf16
to_dtype_3 = to.dtype(matmul_default_1, f32) f32
return [to_dtype_3]""",
    )


def test_save_norms() -> None:
    """The norm runs without gradients; the op that has its name gives the gradients."""
    graph_module = after(norm(), *analysis(O1), InsertCasts())
    assert_expected_inline(
        change(graph_module, SaveNorms(("layer_norm_default",), LOW)),
        """\
w2 f32
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
add_tensor = add.Tensor(x0, linear_default) f32
layer_norm_default = layer_norm(add_tensor, [8], w2) f32
to_dtype_2 = to.dtype(layer_norm_default, bf16) bf16
linear_default_1 = linear(to_dtype_2, to_dtype_1) bf16
to_dtype_3 = to.dtype(linear_default_1, f32) f32
return [to_dtype_3]
--- save_norms
w2 f32
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
add_tensor = add.Tensor(x0, linear_default) f32
detach_default = detach(add_tensor) f32
detach_default_1 = detach(w2) f32
native_layer_norm_default = native_layer_norm(detach_default, [8], detach_default_1, None, 1e-05) f32 f32 f32
getitem = getitem(native_layer_norm_default, 0) f32
getitem_1 = getitem(native_layer_norm_default, 1) f32
getitem_2 = getitem(native_layer_norm_default, 2) f32
sub_tensor = sub.Tensor(detach_default, getitem_1) f32
mul_tensor = mul.Tensor(sub_tensor, getitem_2) f32
layer_norm_default = norm_gradient(add_tensor, w2, None, getitem, mul_tensor, getitem_2, 1, True, bf16) f32
to_dtype_2 = to.dtype(layer_norm_default, bf16) bf16
linear_default_1 = linear(to_dtype_2, to_dtype_1) bf16
to_dtype_3 = to.dtype(linear_default_1, f32) f32
return [to_dtype_3]""",
    )


def test_save_norms_written_out() -> None:
    """Only the reads of the norm's own input move behind a detach."""
    build = GraphBuilder()
    x, scale = build.input(4, 8), build.weight(8)
    mean = build.call(aten.mean.dim, build.call(aten.pow.Tensor_Scalar, x, 2), [-1], True)
    inverse = build.call(aten.rsqrt.default, build.call(aten.add.Tensor, mean, 1e-6))
    normed = build.call(aten.mul.Tensor, scale, build.call(aten.mul.Tensor, x, inverse))
    graph_module = build.finish(build.call(aten.add.Tensor, x, normed))
    assert_expected_inline(
        change(graph_module, SaveNorms((normed.name,), LOW)),
        """\
w1 f32
x0 f32
pow_tensor_scalar = pow.Tensor_Scalar(x0, 2) f32
mean_dim = mean.dim(pow_tensor_scalar, [-1], True) f32
add_tensor = add.Tensor(mean_dim, 1e-06) f32
rsqrt_default = rsqrt(add_tensor) f32
mul_tensor = mul.Tensor(x0, rsqrt_default) f32
mul_tensor_1 = mul.Tensor(w1, mul_tensor) f32
add_tensor_1 = add.Tensor(x0, mul_tensor_1) f32
return [add_tensor_1]
--- save_norms
w1 f32
x0 f32
detach_default = detach(x0) f32
pow_tensor_scalar = pow.Tensor_Scalar(detach_default, 2) f32
mean_dim = mean.dim(pow_tensor_scalar, [-1], True) f32
add_tensor = add.Tensor(mean_dim, 1e-06) f32
rsqrt_default = rsqrt(add_tensor) f32
mul_tensor = mul.Tensor(detach_default, rsqrt_default) f32
detach_default_1 = detach(w1) f32
mul_tensor_2 = mul.Tensor(detach_default_1, mul_tensor) f32
mul_tensor_1 = norm_gradient(x0, w1, None, mul_tensor_2, mul_tensor, rsqrt_default, 1, False, bf16) f32
add_tensor_1 = add.Tensor(x0, mul_tensor_1) f32
return [add_tensor_1]""",
    )


def test_insert_casts() -> None:
    """The casts of the plan, and the dtype argument of softmax, which reads low and computes in float32."""
    assert_expected_inline(
        change(after(mlp(), *analysis(O1)), InsertCasts()),
        """\
w1 f32
x0 f32
linear_default = linear(x0, w1) f32
relu_default = relu(linear_default) f32
softmax_int = softmax.int(relu_default, -1) f32
return [softmax_int]
--- insert_casts
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
relu_default = relu(linear_default) bf16
softmax_int = softmax.int(relu_default, -1, dtype=f32) f32
return [softmax_int]""",
    )


def test_clean_casts() -> None:
    """A cast that undoes the user's widening goes; the user's cast stays."""
    build = GraphBuilder()
    x, weight = build.input(4, 8), build.weight(8, 8)
    wide = build.call(aten.to.dtype, build.call(aten.linear.default, x, weight), torch.float32)
    graph_module = build.finish(build.call(aten.linear.default, wide, weight), wide)
    assert_expected_inline(
        change(after(graph_module, *analysis(O1), InsertCasts()), CleanCasts()),
        """\
w1 f32
x0 f32
to_dtype_1 = to.dtype(x0, bf16) bf16
to_dtype_2 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype_1, to_dtype_2) bf16
to_dtype = to.dtype(linear_default, f32) f32
to_dtype_3 = to.dtype(to_dtype, bf16) bf16
linear_default_1 = linear(to_dtype_3, to_dtype_2) bf16
to_dtype_4 = to.dtype(linear_default_1, f32) f32
return [to_dtype_4, to_dtype]
--- clean_casts
w1 f32
x0 f32
to_dtype_1 = to.dtype(x0, bf16) bf16
to_dtype_2 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype_1, to_dtype_2) bf16
to_dtype = to.dtype(linear_default, f32) f32
linear_default_1 = linear(linear_default, to_dtype_2) bf16
to_dtype_4 = to.dtype(linear_default_1, f32) f32
return [to_dtype_4, to_dtype]""",
    )


def test_remove_casts() -> None:
    """The graph that the plan was made for; the default of the dtype argument is written out."""
    graph_module = after(mlp(), *analysis(O1), InsertCasts())
    assert_expected_inline(
        change(graph_module, RemoveCasts(workspace(graph_module).plan)),
        """\
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
relu_default = relu(linear_default) bf16
softmax_int = softmax.int(relu_default, -1, dtype=f32) f32
return [softmax_int]
--- remove_casts
w1 f32
x0 f32
linear_default = linear(x0, w1) f32
relu_default = relu(linear_default) f32
softmax_int = softmax.int(relu_default, -1, dtype=None) f32
return [softmax_int]""",
    )


def test_explicit_casts() -> None:
    """Softmax widens by its argument; the cast says it."""
    graph_module = after(mlp(), *analysis(O1), InsertCasts())
    assert_expected_inline(
        change(graph_module, ExplicitCasts(LOW)),
        """\
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
relu_default = relu(linear_default) bf16
softmax_int = softmax.int(relu_default, -1, dtype=f32) f32
return [softmax_int]
--- explicit_casts
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
relu_default = relu(linear_default) bf16
to_dtype_2 = to.dtype(relu_default, f32) f32
softmax_int = softmax.int(to_dtype_2, -1, dtype=f32) f32
return [softmax_int]""",
    )


def test_read_stored() -> None:
    """A product reads the stored weight as it is; what reads it in float32 gets a cast."""
    build = GraphBuilder()
    x, weight = build.input(4, 8), build.weight(8, 8)
    product = build.call(aten.linear.default, x, weight)
    graph_module = build.finish(product, build.call(aten.exp.default, weight))
    after(graph_module, *analysis(KEPT_LOW), InsertCasts())
    assert_expected_inline(
        change(graph_module, ReadStored(("w1",), LOW)),
        """\
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
exp_default = exp(w1) f32
return [linear_default, exp_default]
--- read_stored
w1 bf16
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
linear_default = linear(to_dtype, w1) bf16
to_dtype_2 = to.dtype(w1, f32) f32
exp_default = exp(to_dtype_2) f32
return [linear_default, exp_default]""",
    )


def test_read_shadows() -> None:
    """The cast of a parameter becomes a read of its low copy, which passes gradients to the parameter."""
    build = GraphBuilder()
    x, weight, _low = build.input(4, 8), build.weight(8, 8), build.input(8, 8, dtype=LOW)
    graph_module = build.finish(build.call(aten.linear.default, x, weight))
    after(graph_module, *analysis(O1), InsertCasts())
    assert_expected_inline(
        change(graph_module, ReadShadows({"w1": "x2"}, differentiable=True)),
        """\
x2 bf16
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(to_dtype, to_dtype_1) bf16
to_dtype_2 = to.dtype(linear_default, f32) f32
return [to_dtype_2]
--- read_shadows
x2 bf16
w1 f32
x0 f32
to_dtype = to.dtype(x0, bf16) bf16
shadow_weights = shadow_weights(x2, w1) bf16
getitem = getitem(shadow_weights, 0) bf16
linear_default = linear(to_dtype, getitem) bf16
to_dtype_2 = to.dtype(linear_default, f32) f32
return [to_dtype_2]""",
    )


def test_keep_read() -> None:
    """A buffer that the graph writes is read through a copy that the backward of a compiler keeps."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = self.fc(x) * (self.mean + 1)
            self.mean.add_(y.detach().mean(0))
            return y

    assert_expected_inline(
        change(captured(Centred(), torch.randn(2, 4)), KeepRead()),
        """\
fc_weight f32
fc_bias f32
mean_1 f32
x f32
linear = linear(x, fc_weight, fc_bias) f32
add = add.Tensor(mean_1, 1) f32
mul = mul.Tensor(linear, add) f32
detach = detach(mul) f32
mean = mean.dim(detach, [0]) f32
add_ = add_.Tensor(mean_1, mean) f32
return [mul]
--- keep_read
fc_weight f32
fc_bias f32
mean_1 f32
x f32
linear = linear(x, fc_weight, fc_bias) f32
kept_copy_default = ampgraph.kept_copy(mean_1) f32
add = add.Tensor(kept_copy_default, 1) f32
mul = mul.Tensor(linear, add) f32
detach = detach(mul) f32
mean = mean.dim(detach, [0]) f32
add_ = add_.Tensor(mean_1, mean) f32
return [mul]""",
    )


def test_scale_loss() -> None:
    """Gradients are scaled where they enter, at outputs, and unscaled where they leave."""
    build = GraphBuilder()
    x, weight, scale, inverse = build.input(4, 8), build.weight(8, 8), build.input(), build.input()
    probe = build.input(2)
    graph_module = build.finish(build.call(aten.linear.default, x, weight))
    step = ScaleLoss((("w1", 0),), 2, state=(scale.name, inverse.name, probe.name))
    assert_expected_inline(
        change(graph_module, step),
        """\
x4 f32
x3 f32
x2 f32
w1 f32
x0 f32
linear_default = linear(x0, w1) f32
return [linear_default]
--- scale_loss
x4 f32
x3 f32
x2 f32
w1 f32
x0 f32
unscale_gradients = unscale_gradients(x4, x3, 0, w1) f32
getitem = getitem(unscale_gradients, 0) f32
unscale_gradients_1 = unscale_gradients(x4, x3, 1, x0) f32
getitem_1 = getitem(unscale_gradients_1, 0) f32
linear_default = linear(getitem_1, getitem) f32
scale_gradients = scale_gradients(x2, linear_default) f32
getitem_2 = getitem(scale_gradients, 0) f32
return [getitem_2]""",
    )


def test_verify() -> None:
    """A cast lost after the plan is an error that names the node."""
    graph_module = after(mlp(), *analysis(O1), InsertCasts())
    assert not run_passes(graph_module, [Verify()]).modified
    lost = inserted(graph_module)[0]
    lost.replace_all_uses_with(lost.args[0])
    graph_module.graph.erase_node(lost)
    with pytest.raises(VerifyError) as caught:
        run_passes(graph_module, [Verify()])
    assert_expected_inline(
        findings(graph_module, textwrap.wrap(str(caught.value), 100)),
        """\
w1 f32
x0 f32
to_dtype_1 = to.dtype(w1, bf16) bf16
linear_default = linear(x0, to_dtype_1) bf16
relu_default = relu(linear_default) bf16
softmax_int = softmax.int(relu_default, -1, dtype=f32) f32
return [softmax_int]
---
verify: node 'linear_default' (aten.linear.default) is recorded as (torch.bfloat16,) but yields
(torch.float32,)""",
    )
