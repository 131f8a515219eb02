"""How far a converted model's outputs are from float32's, and how far they may be."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..errors import AmpGraphError
from ..plan import Plan
from ..runtime.unchanged_model import unchanged
from . import graph_view as view
from .converted import Converted
from .tables import Column, table

# Unit roundoffs of error for the square root of each rounding in a row: independent errors add up by their
# squares. docs/decisions.md says how much room this leaves.
FACTOR = 2
_RANDOM = ("dropout", "bernoulli", "rand", "multinomial", "normal")
_COLUMNS = (
    Column("", 1),
    Column("output", 40, keep="end"),
    Column("shape", 24),
    Column("dtype", 9),
    Column("error", 60),
)


def assert_close_to_fp32(
    amp: Converted, args: tuple, kwargs: Mapping[str, Any] | None = None, *, tolerance: float | None = None
) -> None:
    """Asserts that a converted model gives what its float32 source gives, up to the low dtype's precision.

    Both run under ``torch.no_grad`` in the model's current mode, from the same random state; buffers (running
    statistics) and attributes of modules are as before afterwards. An output's error is the 2-norm of the
    difference over that of the float32 output; outputs that are not floating point must be equal.

    Args:
        amp: The converted model.
        args: Positional arguments.
        kwargs: Keyword arguments.
        tolerance: The largest error allowed. Default: ``2 * u * sqrt(n)``, where ``u`` is the low dtype's
            unit roundoff (2**-11 for float16, 2**-8 for bfloat16) and ``n`` the largest number of roundings
            to it in a row.

    Raises:
        AssertionError: An output is farther off; the message has each output's error and says where the
            tolerance comes from.
        AmpGraphError: ``amp`` is not a converted model.
    """
    if not isinstance(amp, Converted):
        raise AmpGraphError(f"expected what ampgraph.convert returns; got a {type(amp).__name__}.")
    args = args if isinstance(args, tuple) else (args,)
    expected = _outputs(amp.source, amp, args, kwargs)
    found = _outputs(amp, amp, args, kwargs)
    allowed, why = _tolerance(amp, tolerance)
    if list(found) != list(expected):
        raise AssertionError(f"outputs are {list(found)}, in float32 {list(expected)}.")
    errors = {name: _error(found[name], expected[name]) for name in expected}
    # NaN is not within anything.
    if all(error <= allowed for error in errors.values()):
        return
    rows = [
        ("" if e <= allowed else ">", name or "result", *_kind(expected[name]), _said(e, found[name]))
        for name, e in errors.items()
    ]
    raise AssertionError(
        f"{sum(bool(row[0]) for row in rows)} of {len(rows)} outputs are farther from float32 than "
        f"{allowed:.2e} ({why}):\n{table(_COLUMNS, rows)}{_random_ops(amp.graph_module)}"
    )


def _outputs(
    model: nn.Module, amp: Converted, args: tuple, kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    args, kwargs = copy.deepcopy((args, dict(kwargs or {})))  # a model may write to its inputs
    with torch.no_grad(), torch.random.fork_rng(), unchanged(amp.source):
        torch.manual_seed(0)
        result = model(*args, **kwargs)
    leaves, _ = pytree.tree_flatten_with_path(result)
    return {pytree.keystr(path): leaf for path, leaf in leaves}


def _tolerance(amp: Converted, given: float | None) -> tuple[float, str]:
    if given is not None:
        return given, "as given"
    low_dtype = amp.plan.low_dtype
    graphs = amp.graph_modules if amp.is_just_in_time else [amp.graph_module]
    unit, count = torch.finfo(low_dtype).eps / 2, max(1, sum(map(roundings_in_a_row, graphs)))
    return FACTOR * unit * math.sqrt(count), (
        f"{FACTOR} unit roundoffs of {view.dtype_name(low_dtype)}, {unit:.1e} each, by the square root of "
        f"{count} roundings in a row"
    )


def roundings_in_a_row(graph_module: GraphModule) -> int:
    """Returns how many roundings to the low dtype lie, at most, on a path; clear ops round nothing."""
    _, plan = view.rewritten(graph_module)
    counts: dict[Node, int] = {}
    for node in graph_module.graph.nodes:
        before = max((counts[n] for n in node.all_input_nodes), default=0)
        counts[node] = before + _rounds(node, plan)
    return max(counts.values(), default=0)


def _rounds(node: Node, plan: Plan) -> bool:
    if view.is_item(node) or not any(v.dtype == plan.low_dtype for v in view.values(node)):
        return False
    decision = plan.decisions.get(node.name)
    if view.kind_of(node) == "op":
        return decision is None or decision.op_class != "clear"
    return view.kind_of(node) == "cast"


def _error(found: Any, expected: Any) -> float:
    if not isinstance(expected, torch.Tensor):
        return 0.0 if found == expected else math.inf
    if found.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    ours, theirs = found.double(), expected.double()
    # Infinities (masks) must be where they are in float32; a difference of infinities is NaN.
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        return math.inf
    ours, theirs = (t.masked_fill(~theirs.isfinite(), 0) for t in (ours, theirs))
    norm = float(theirs.norm())
    difference = float((ours - theirs).norm())
    return difference / norm if norm else (math.inf if difference else 0.0)


def _kind(value: Any) -> tuple[str, str]:
    if not isinstance(value, torch.Tensor):
        return "", type(value).__name__
    return "x".join(map(str, value.shape)) or "scalar", view.dtype_name(value.dtype)


def _said(error: float, found: Any) -> str:
    if not math.isinf(error):
        return f"{error:.2e}"
    if isinstance(found, torch.Tensor) and found.is_floating_point() and not bool(found.isfinite().all()):
        return f"{int((~found.isfinite()).sum())} of {found.numel()} elements are not finite"
    return "differs"


def _random_ops(graph_module: GraphModule) -> str:
    ops = sorted({view.op_name(n) for n in graph_module.graph.nodes if _is_random(view.op_name(n), n)})
    return f"\nThe graph draws random numbers ({', '.join(ops)}): compare in eval mode." if ops else ""


def _is_random(name: str, node: Node) -> bool:
    # Dropout in eval mode stays in the graph and draws nothing.
    return any(word in name for word in _RANDOM) and not ("dropout" in name and False in node.args)
