"""For test suites: a compact text of where the casts are, and assertions on it.

assert cast_map(amp) == "linear: f16 <- cast(x), cast(weight), cast(bias)"
assert_dtype(amp, "encoder.*.norm*", torch.float32)
assert_casts(amp, at_most=4, activations_only=True)
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch.fx import GraphModule, Node

from . import graph_view as view
from .errors import did_you_mean
from .module import AmpModule
from .module_path import module_paths_of
from .plan import Plan

__all__ = ["assert_casts", "assert_dtype", "cast_map"]


def cast_map(amp: AmpModule | GraphModule) -> str:
    """Returns one line for every op that computes in a floating dtype or reads an inserted cast.

    ``cast(x)`` is an operand that ampgraph cast, ``widen(x)`` one that the kernel widens itself, ``x`` one
    that is read as it is. Where one tensor is cast twice to the same dtype, the later ones are
    ``cast#2(x)`` and so on; a mask that is clamped into the low range before is ``cast(clamp(x))``. The
    text is the same for the same graph, and fit for golden files. Lines of the bodies of ``torch.cond`` and
    its kind follow the main graph's, as ``true_graph_0/linear: ...``.

    Args:
        amp: What `ampgraph.convert` returned, or its graph module.

    Example:
        >>> print(cast_map(amp))
        linear: f16 <- cast(x), cast(weight), cast(bias)
        softmax: f32 <- widen(linear)
    """
    graph_module, plan = view.rewritten(amp)
    return "\n".join(_lines(graph_module, plan).values())


def assert_dtype(amp: AmpModule | GraphModule, pattern: str, dtype: torch.dtype) -> None:
    """Asserts that every op which matches computes in ``dtype``.

    Args:
        amp: What `ampgraph.convert` returned, or its graph module.
        pattern: A glob over graph node names and over module paths, as in ``Policy(rules=...)``: a module's
            path matches everything inside the module.
        dtype: The dtype expected of each matching op with a floating result.

    Raises:
        AssertionError: An op has another dtype, or nothing matches; the message shows the lines of the
            `cast_map` in question with their reasons.
    """
    graph_module, plan = view.rewritten(amp)
    nodes = [n for n in _ops(graph_module, plan) if any(v.is_floating_point() for v in view.values(n))]
    matching = [n for n in nodes if any(fnmatchcase(name, pattern) for name in _names(n))]
    if not matching:
        near = did_you_mean(pattern, dict.fromkeys(name for n in nodes for name in _names(n)))
        raise AssertionError(f"{pattern!r} matches no floating-point op, no module.{near}\n{cast_map(amp)}")
    wrong = [n for n in matching if any(v.dtype != dtype for v in view.values(n) if v.is_floating_point())]
    if not wrong:
        return
    lines = _lines(graph_module, plan)
    reasons = _reasons(graph_module, plan)
    shown = "\n".join(f"  {lines[n]}\n    {reasons.get(n, 'not in the plan')}" for n in wrong if n in lines)
    count = f"{len(wrong)} of {len(matching)}"
    raise AssertionError(f"{count} ops that match {pattern!r} are not {dtype}:\n{shown}")


def assert_casts(
    amp: AmpModule | GraphModule,
    exactly: int | None = None,
    *,
    at_most: int | None = None,
    activations_only: bool = False,
    to: torch.dtype | None = None,
) -> None:
    """Asserts how many casts ampgraph inserted.

    Args:
        amp: What `ampgraph.convert` returned, or its graph module.
        exactly: The number expected.
        at_most: The largest number allowed.
        activations_only: Leave out casts of parameters, buffers and constants.
        to: Count only casts to this dtype.

    Raises:
        AssertionError: The number is another; the message lists the casts with their reasons.
        TypeError: Not exactly one of ``exactly`` and ``at_most`` is given.
    """
    if (exactly is None) == (at_most is None):
        raise TypeError("assert_casts takes one of exactly= and at_most=.")
    graphs = view.with_bodies(*view.rewritten(amp))
    casts = [cast for graph in graphs for cast in view.inserted_casts(graph.module)]
    if activations_only:
        casts = [n for n in casts if not view.is_parameter_cast(n)]
    if to is not None:
        casts = [n for n in casts if view.values(n)[0].dtype == to]
    if len(casts) == exactly or (at_most is not None and len(casts) <= at_most):
        return
    what = ("activation " if activations_only else "") + "casts" + (f" to {to}" if to else "")
    wanted = f"exactly {exactly}" if exactly is not None else f"at most {at_most}"
    shown = "\n".join(f"  {_cast_line(n)}\n    {n.meta['ampgraph']['reason']}" for n in casts)
    raise AssertionError(f"expected {wanted} {what}, found {len(casts)}:\n{shown}\nin\n{cast_map(amp)}")


def _ops(graph_module: GraphModule, plan: Plan) -> Iterator[Node]:
    """Yields the ops that compute, in bodies too: neither inserted casts nor the picking of one result."""
    for graph in view.with_bodies(graph_module, plan):
        for node in graph.module.graph.nodes:
            if node.op == "call_function" and view.kind_of(node) == "op" and not view.is_item(node):
                yield node


def _names(node: Node) -> Iterator[str]:
    yield node.name
    yield from (path for path in module_paths_of(node) if path)


def _lines(graph_module: GraphModule, plan: Plan) -> dict[Node, str]:
    """Returns the line of every node that the cast map shows, in graph order, bodies last."""
    lines: dict[Node, str] = {}
    for graph in view.with_bodies(graph_module, plan):
        for node in graph.module.graph.nodes:
            shown = node.op == "output" or view.kind_of(node) == "op"
            if shown and not view.is_item(node) and (line := _line(node, graph.plan)):
                lines[node] = graph.prefix + line
    return lines


def _line(node: Node, plan: Plan) -> str:
    """Returns a node's line, or ``""`` where it neither computes in a floating dtype nor reads a cast."""
    reads = list(view.operands(node))
    floats = [v.dtype for v in view.values(node) if v.is_floating_point()] if node.op != "output" else []
    if not floats and not any(view.kind_of(source) == "cast" for _, source in reads):
        return ""
    dtypes = "/".join(dict.fromkeys(map(view.short_dtype, floats)))
    head = f"{node.name}: {dtypes}" if dtypes else node.name
    widened = set(plan.widened)
    shown = ", ".join(_operand(source, (node.name, path) in widened, plan) for path, source in reads)
    return f"{head} <- {shown}" if shown else head


def _operand(node: Node, widened: bool, plan: Plan) -> str:
    if view.kind_of(node) == "cast":
        source, dtype = view.cast_source(node), view.values(node)[0].dtype
        same = [cast for cast in view.casts_of(source) if view.values(cast)[0].dtype == dtype]
        number = f"#{same.index(node) + 1}" if same.index(node) else ""
        label = view.label_of(source)
        return f"cast{number}({f'clamp({label})' if view.is_clamped(node) else label})"
    if widened and view.values(node)[0].dtype == plan.low_dtype:
        return f"widen({view.label_of(node)})"
    return view.label_of(node)


def _cast_line(node: Node) -> str:
    source = view.cast_source(node)
    users = ", ".join(view.label_of(u) for u in node.users)
    return f"{view.label_of(source)}: {view.type_of(source)} -> {view.type_of(node)} for {users}"


def _reasons(graph_module: GraphModule, plan: Plan) -> dict[Node, str]:
    """Returns, for every planned node, who decided and why."""
    return {
        node: f"{decision.by}: {decision.reason}"
        for graph in view.with_bodies(graph_module, plan)
        for node in graph.module.graph.nodes
        if (decision := graph.plan.decisions.get(node.name))
    }
