"""Every entry of torch's own autocast tests as a one-op model, converted: its dtype and its very values.

The 121 CUDA entries run under `OpLists.torch()`, in float16 on the CPU. The 55 CPU entries are compared with
``torch.autocast("cpu")`` really run; `OpLists.torch()` is CUDA's, so the four ops that CPU autocast alone
lists are moved to the class that it gives them.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import ampgraph
from ampgraph import NoLossScale, OpLists, Policy
from ampgraph.passes import ClassifyOps, PlaceCasts, PropagatePrecision, run_passes, workspace
from tests.autocast_entries import RUNS_IN, Entry, cast, entries
from tests.captures import LastCapture

CUDA, CPU = list(entries("cuda")), list(entries("cpu"))
PLACEMENTS = ("optimal", "autocast")
LAST = LastCapture()  # both placements stand together

CUDA_LISTS = OpLists.torch()
CPU_LISTS = CUDA_LISTS.with_white("aten._addmm_activation", "aten._native_multi_head_attention").with_black(
    "aten.avg_pool3d", "aten.reflection_pad1d"
)

# What no CPU can run or no capture can hold: planned on a graph written by hand.
PLANNED_ONLY = {
    "cudnn_convolution": "has no CPU kernel",
    "cudnn_convolution_transpose": "has no CPU kernel",
    "equal": "returns a Python bool",
}

# Ops that need operands of one dtype, with operands that differ: only a running autocast makes that legal. In
# a float32 model the float16 operands are made so by a rule on a copy of them.
MIXED = {"bilinear", "dot", "vdot", "tensordot", "scatter_add"}


class CopiesFirst(torch.nn.Module):
    """Copies the operands that an entry has in the low dtype, and then runs it."""

    def __init__(self, module: torch.nn.Module, is_low: list[bool]) -> None:
        super().__init__()
        self.module, self.is_low = module, is_low

    def forward(self, *tensors: torch.Tensor):
        return self.module(*(t.clone() if low else t for t, low in zip(tensors, self.is_low, strict=True)))


def policy(lists: OpLists, placement: str, low: torch.dtype) -> Policy:
    options = {"keep_io_dtypes": False, "loss_scale": NoLossScale()}
    return Policy(ops=lists, dtype=low, placement=placement, **options)


def without_planned_only(listed: list[Entry]) -> list[Entry]:
    return [entry for entry in listed if entry.op not in PLANNED_ONLY]


def converted(entry: Entry, lists: OpLists, placement: str):
    module, tensors = entry.module()
    wanted = policy(lists, placement, entry.low)
    if entry.op in MIXED and entry.section == "torch_need_autocast_promote":
        module = CopiesFirst(module, [t.dtype == entry.low for t in tensors])
        tensors = cast(tensors, torch.float32)
        wanted = wanted.replace(rules={"clone*": "low"})
    with LAST.of(entry.id):
        amp = ampgraph.convert(module, tensors, policy=wanted)
    return amp(*tensors)


def assert_identical(actual, expected):
    for one, other in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def first_tensor(result) -> torch.Tensor:
    return next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("entry", without_planned_only(CUDA), ids=lambda entry: entry.id)
@pytest.mark.filterwarnings("ignore")
def test_cuda_entry(entry: Entry, placement: str):
    result = converted(entry, CUDA_LISTS, placement)
    assert first_tensor(result).dtype == entry.output_dtype
    assert_identical(result, entry.reference())


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("entry", without_planned_only(CPU), ids=lambda entry: entry.id)
@pytest.mark.filterwarnings("ignore")
def test_cpu_entry(entry: Entry, placement: str):
    with torch.autocast("cpu", dtype=entry.low):
        expected = entry.run()
    result = converted(entry, CPU_LISTS, placement)
    assert first_tensor(result).dtype == entry.output_dtype
    assert_identical(result, expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("entry", [e for e in CUDA if e.op in PLANNED_ONLY], ids=lambda entry: entry.id)
def test_planned_only(entry: Entry, placement: str):
    graph_module = hand_written(entry)
    wanted = policy(CUDA_LISTS, placement, entry.low)
    analysis = (
        ClassifyOps(wanted.replace(keep_io_dtypes=False)),
        PropagatePrecision(wanted),
        PlaceCasts(wanted),
    )
    run_passes(graph_module, analysis)
    plan = workspace(graph_module).plan
    assert (
        next(d for name, d in plan.decisions.items() if name.startswith(entry.op)).dtype == entry.output_dtype
    )
    expected = 2 if RUNS_IN[entry.section] == "low" else 0
    assert len(plan.casts) == expected


def hand_written(entry: Entry) -> fx.GraphModule:
    """Returns the graph of one op, its values fake."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def placeholder(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = mode.from_tensor(leaf)
        return node

    args = pytree.tree_map(placeholder, entry.args)
    node = graph.call_function(getattr(torch.ops.aten, entry.op).default, args)
    node.meta["val"] = True if entry.output_dtype is None else args[0].meta["val"].new_empty(4)
    graph.output(node)
    return fx.GraphModule({}, graph)
