"""For test suites: a compact text that shows the casts, and assertions on it.

assert cast_map(amp) == "linear: f16 <- cast(x), cast(weight), cast(bias)"
assert_dtype(amp, "encoder.*.norm*", torch.float32)
assert_casts(amp, at_most=4, activations_only=True)
assert_no_casts_between(amp, "encoder.*.attn", "encoder.*.proj")
assert_close_to_fp32(amp, (x,))

The pytest fixture ``ampgraph_golden`` compares with golden files, see ``ampgraph/pytest_plugin``.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch.fx import GraphModule, Node

from .errors import PolicyError, did_you_mean
from .module import AmpModule
from .origin import module_paths_of
from .plan import Plan
from .policy.policy import DTYPE_NAMES
from .policy.rules import NODE_PREFIX
from .report import graph_view as view
from .report.cast_map import SHOWN, cast_lines, excerpt, left_out
from .report.numerics import assert_close_to_fp32

__all__ = ["assert_casts", "assert_close_to_fp32", "assert_dtype", "assert_no_casts_between", "cast_map"]


def cast_map(amp: AmpModule | GraphModule) -> str:
    """Returns one line for every op that computes in a floating dtype or reads an inserted cast.

    ``cast(x)`` is an operand that ampgraph casts. The kernel widens the operand ``widen(x)``. The op reads
    ``x`` unchanged. A second cast of one tensor to the same dtype is ``cast#2(x)``. A mask that is clamped
    into the low range before the cast is ``cast(clamp(x))``. Equal graphs give equal text, so golden files
    work. Bodies of ``torch.cond`` and similar ops follow the main graph, as ``true_graph_0/linear: ...``.

    Args:
        amp: The converted model, or its graph module.

    Example:
        >>> print(cast_map(amp))
        linear: f16 <- cast(x), cast(weight), cast(bias)
        softmax: f32 <- widen(linear)
    """
    graph_module, plan = view.rewritten(amp)
    return "\n".join(cast_lines(graph_module, plan).values())


def assert_dtype(amp: AmpModule | GraphModule, pattern: str, dtype: torch.dtype | str) -> None:
    """Asserts that every op which matches computes in ``dtype``.

    Args:
        amp: The converted model, or its graph module.
        pattern: A glob over module paths and graph node names; with the prefix ``node:``, as in
            ``Policy(rules=...)``, only over node names. A module's path matches all nodes inside it.
        dtype: The dtype, or its name, expected of each matching op with a floating result.

    Raises:
        AssertionError: An op has another dtype, or nothing matches; the message shows the lines of the
            `cast_map` of these ops with their reasons.
        PolicyError: ``pattern`` is not a string, or ``dtype`` is not a dtype.
    """
    dtype = _dtype(dtype)
    graph_module, plan = view.rewritten(amp)
    floats = [n for n in _ops(graph_module, plan) if any(v.is_floating_point() for v in view.values(n))]
    matching = _matching(floats, pattern, "floating-point op")
    wrong = [n for n in matching if any(v.dtype != dtype for v in view.values(n) if v.is_floating_point())]
    if not wrong:
        return
    shown = excerpt(cast_lines(graph_module, plan), wrong, _reasons(graph_module, plan))
    count = f"{len(wrong)} of {len(matching)}"
    raise AssertionError(f"{count} ops that match {pattern!r} are not {dtype}:\n{shown}")


def _dtype(given: torch.dtype | str) -> torch.dtype:
    legal = {**DTYPE_NAMES, "float32": torch.float32, "fp32": torch.float32}
    if isinstance(given, torch.dtype):
        return given
    if (name := str(given).removeprefix("torch.")) in legal:
        return legal[name]
    raise PolicyError(f"dtype={given!r} is not known; legal: {', '.join(legal)}.{did_you_mean(name, legal)}")


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
        amp: The converted model, or its graph module.
        exactly: The number expected.
        at_most: The largest number allowed.
        activations_only: Do not count casts of parameters, buffers and constants.
        to: Count only casts to this dtype.

    Raises:
        AssertionError: The number differs; the message lists the casts with their reasons.
        TypeError: Not exactly one of ``exactly`` and ``at_most`` is given.
    """
    if (exactly is None) == (at_most is None):
        raise TypeError("assert_casts takes one of exactly= and at_most=.")
    graph_module, plan = view.rewritten(amp)
    graphs = view.with_bodies(graph_module, plan)
    casts = [cast for graph in graphs for cast in view.inserted_casts(graph.module)]
    if activations_only:
        casts = [n for n in casts if not view.is_parameter_cast(n)]
    if to is not None:
        casts = [n for n in casts if view.values(n)[0].dtype == to]
    if len(casts) == exactly or (at_most is not None and len(casts) <= at_most):
        return
    what = ("activation " if activations_only else "") + "casts" + (f" to {to}" if to else "")
    wanted = f"exactly {exactly}" if exactly is not None else f"at most {at_most}"
    raise AssertionError(
        f"expected {wanted} {what}, found {len(casts)}:\n{_described(casts, graph_module, plan)}"
    )


def assert_no_casts_between(amp: AmpModule | GraphModule, first: str, second: str) -> None:
    """Asserts that no tensor on a path from one part of the model to another is cast.

    Casts wholly inside one of the parts and casts of parameters do not count.

    Args:
        amp: The converted model, or its graph module.
        first: Start of the paths: a glob over node names and module paths, as for `assert_dtype`.
        second: End of the paths, also a glob.

    Raises:
        AssertionError: A path contains a cast, no path exists, or a glob matches nothing; the message shows
            the casts and the graph around them.
    """
    graph_module, plan = view.rewritten(amp)
    ops = list(_ops(graph_module, plan))
    begin, end = (set(_matching(ops, pattern, "op")) for pattern in (first, second))
    reached, leading = _closure(begin, "users"), _closure(end, "all_input_nodes")
    if not (reached & end):
        raise AssertionError(f"nothing leads from {first!r} to {second!r}.")
    between = [n for n in _in_order(graph_module, plan) if n in reached and n in leading]
    casts = [
        n for n in between if view.kind_of(n) == "cast" and not any(_inside(n, part) for part in (begin, end))
    ]
    if casts:
        raise AssertionError(
            f"{len(casts)} casts on the way from {first!r} to {second!r}:\n"
            f"{_described(casts, graph_module, plan)}"
        )


def _closure(nodes: set[Node], neighbours: str) -> set[Node]:
    """Returns the nodes and all nodes that are reachable from them."""
    found, todo = set(nodes), list(nodes)
    while todo:
        new = [n for n in getattr(todo.pop(), neighbours) if n not in found]
        found.update(new)
        todo += new
    return found


def _inside(cast: Node, part: set[Node]) -> bool:
    """Whether the producer of a cast's tensor and all its readers are in one part of the model."""
    source = view.cast_source(cast)
    made_by = source.args[0] if view.is_item(source) else source
    return made_by in part and all(user in part for user in cast.users)


def _in_order(graph_module: GraphModule, plan: Plan) -> Iterator[Node]:
    for graph in view.with_bodies(graph_module, plan):
        yield from graph.module.graph.nodes


def _described(casts: list[Node], graph_module: GraphModule, plan: Plan) -> str:
    """Returns the casts with their reasons, and the graph around their readers."""
    lines = [f"  {_cast_line(n)}\n    {n.meta['ampgraph']['reason']}" for n in casts[:SHOWN]]
    readers = {user for cast in casts for user in cast.users}
    around = excerpt(cast_lines(graph_module, plan), readers)
    return "\n".join([*lines, *left_out(casts), "in", around])


def _matching(nodes: list[Node], pattern: str, what: str) -> list[Node]:
    """Returns the nodes that a glob matches by name or module path; raises AssertionError without any."""
    if not isinstance(pattern, str):
        raise PolicyError(f"{pattern!r}: expected a glob over module paths and node names.")
    glob = pattern.removeprefix(NODE_PREFIX)
    matching = [n for n in nodes if any(fnmatchcase(name, glob) for name in _names(n, glob == pattern))]
    if matching:
        return matching
    near = did_you_mean(pattern, dict.fromkeys(name for n in nodes for name in _names(n)))
    raise AssertionError(f"{pattern!r} matches no {what}, no module.{near}")


def _ops(graph_module: GraphModule, plan: Plan) -> Iterator[Node]:
    """Yields the ops that compute, in bodies too; inserted casts and `getitem` do not count."""
    for graph in view.with_bodies(graph_module, plan):
        for node in graph.module.graph.nodes:
            if node.op == "call_function" and view.kind_of(node) == "op" and not view.is_item(node):
                yield node


def _names(node: Node, with_modules: bool = True) -> Iterator[str]:
    yield node.name
    if with_modules:
        yield from (path for path in module_paths_of(node) if path)


def _cast_line(node: Node) -> str:
    source = view.cast_source(node)
    users = ", ".join(view.label_of(u) for u in node.users)
    return f"{view.label_of(source)}: {view.type_of(source)} -> {view.type_of(node)} for {users}"


def _reasons(graph_module: GraphModule, plan: Plan) -> dict[Node, str]:
    """Returns the deciding rule and the reason of every planned node."""
    return {
        node: f"{decision.by}: {decision.reason}"
        for graph in view.with_bodies(graph_module, plan)
        for node in graph.module.graph.nodes
        if (decision := graph.plan.decisions.get(node.name))
    }
