"""The base class of passes, and the loop that runs passes and checks their contracts.

A pass is a frozen dataclass. Its fields are its options. A pass implements ``run``. `run_passes` checks
``requires`` before the pass and ``ensures`` on the result, lints, recompiles, and names the pass in every
error. Analysis passes store their findings in the `Workspace` at ``graph_module.meta["ampgraph"]`` and never
change the graph.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import is_not
from typing import TYPE_CHECKING, Any, ClassVar

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from ampgraph._compat import tracing_lock
from ampgraph.errors import AmpGraphError, PassError
from ampgraph.marks import META_KEY
from ampgraph.plan import Plan

if TYPE_CHECKING:
    from ampgraph.policy.policy import Policy

    from .analysis.facts import Facts
    from .analysis.precision import Precision
    from .analysis.problem import Problem
    from .analysis.range_hazards import Values
    from .placement.labelling import Placement
    from .placement.step_cost import StepCost


@dataclass
class Workspace:
    """The findings of the analysis passes about one graph.

    Attributes:
        facts: Per node: managed or not, op class, and how each argument is read (`ClassifyOps`).
        values: What is known of the values in the graph, for one low dtype (`PropagatePrecision`).
        problem: Per node: pinned dtype with reason, or free with its constraints (`PropagatePrecision`).
        plan: The decided plan (`PlaceCasts`, `ChooseSaved`).
        costs: What labellings cost (`PlaceCasts`).
        placement: The labelling of the plan (`PlaceCasts`).
        seconds: Wall time by pass name.
        policy: The policy of the plan.
    """

    facts: Facts | None = None
    values: Values | None = None
    problem: Problem | None = None
    plan: Plan | None = None
    costs: StepCost | None = None
    placement: Placement | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    policy: Policy | None = None


class Pass(abc.ABC):
    """Base of all passes; subclasses are frozen dataclasses with a class attribute ``name``."""

    name: ClassVar[str]
    edits: ClassVar[bool] = True

    def __call__(self, graph_module: GraphModule) -> PassResult:
        """Runs the pass on one graph.

        Returns:
            The (same) graph module and whether its graph changed.
        """
        return PassResult(graph_module, self.run(graph_module))

    @abc.abstractmethod
    def run(self, graph_module: GraphModule) -> bool:
        """Does the work in place; returns True when the graph was edited."""

    def requires(self, graph_module: GraphModule) -> None:  # noqa: B027
        """Raises `PassError` when the graph is not what the pass expects."""

    def ensures(self, graph_module: GraphModule) -> None:  # noqa: B027
        """Raises `PassError` when the result is not what the pass promises."""


# Node names, each with the precision to assign.
Pins = tuple[tuple[str, "Precision"], ...]
Hook = Callable[[Pass, GraphModule, bool, float], Any]
# A node, its target, its arguments and keyword arguments; then the keys and the values of its metadata.
_Held = tuple[Any, ...]
_META = 4


def workspace(graph_module: GraphModule) -> Workspace:
    """Returns the graph module's workspace, made on first use."""
    return graph_module.meta.setdefault(META_KEY, Workspace())


def run_passes(graph_module: GraphModule, passes: Iterable[Pass], hook: Hook | None = None) -> PassResult:
    """Runs ``passes`` in order and enforces their contracts.

    Args:
        graph_module: A pre-dispatch ATen graph with ``meta["val"]`` on every node; edited in place.
        passes: The pipeline.
        hook: Called after each pass with (pass, graph module, modified, seconds).

    Raises:
        PassError: A contract was broken or a pass failed; the message names the pass.
    """
    with tracing_lock():  # a trace of another thread would have the sizes that passes compute in its graph
        modified = _run_all(graph_module, passes, hook)
        if modified:
            _recompile(graph_module)
    return PassResult(graph_module, modified)


def _run_all(graph_module: GraphModule, passes: Iterable[Pass], hook: Hook | None) -> bool:
    modified = False
    before: list[_Held] = []
    for step in passes:
        start = time.perf_counter()
        if not before:  # passes that change nothing share one
            before = [_held(node) for node in graph_module.graph.nodes]
        changed = _run_one(step, graph_module, before)
        before = [] if changed else before
        seconds = time.perf_counter() - start
        workspace(graph_module).seconds[step.name] = seconds
        modified |= changed
        if hook:
            hook(step, graph_module, changed, seconds)
    return modified


def _recompile(graph_module: GraphModule) -> None:
    try:
        graph_module.recompile()
    except SyntaxError as error:
        raise PassError(
            f"the graph cannot be written as Python (a module or node name it uses?): {error}"
        ) from error


def _run_one(step: Pass, graph_module: GraphModule, before: list[_Held]) -> bool:
    try:
        step.requires(graph_module)
        changed = step(graph_module).modified
        if changed is None:
            raise PassError(
                f"pass {step.name!r} returned None; legal: True if it edited the graph, else False."
            )
        changed = bool(changed)
        if changed:
            graph_module.graph.lint()
        step.ensures(graph_module)
    except AmpGraphError:
        raise
    except Exception as error:
        raise PassError(f"pass {step.name!r} failed: {type(error).__name__}: {error}") from error
    if changed and not step.edits:
        raise PassError(f"pass {step.name!r} is analysis and must not edit the graph.")
    if not changed:
        _check_untouched(step, graph_module, before)
    return changed


def _held(node: Node) -> _Held:
    """Returns the very objects that a node holds, metadata last, so that a look at them again is cheap."""
    return (node, node.target, node.args, node.kwargs, *node.meta, *node.meta.values())


def _check_untouched(step: Pass, graph_module: GraphModule, before: list[_Held]) -> None:
    """Raises `PassError` if a pass edited the graph and did not say so, or, as analysis, wrote metadata."""
    nodes = list(graph_module.graph.nodes)
    edited = (
        "is analysis and must not edit the graph" if not step.edits else "edited the graph and returned False"
    )
    if len(nodes) != len(before):
        raise PassError(f"pass {step.name!r} {edited}.")
    for node, held in zip(nodes, before, strict=True):
        now = _held(node)
        if len(held) == len(now) and not any(map(is_not, held, now)):
            continue
        if held[:_META] != now[:_META]:  # equal arguments may be another tuple
            raise PassError(f"pass {step.name!r} {edited}: {node.name!r}.")
        if step.edits or not _differing(held, now):
            continue
        raise PassError(
            f"pass {step.name!r} is analysis and must not write node.meta: {_differing(held, now)} of "
            f"{node.name!r}; its findings belong in the workspace."
        )


def _differing(before: _Held, after: _Held) -> list[str]:
    """Returns the keys under which the metadata differs."""
    old, new = _meta(before), _meta(after)
    return [k for k in {**old, **new} if k not in old or k not in new or old[k] is not new[k]]


def _meta(held: _Held) -> dict[str, Any]:
    both = held[_META:]
    return dict(zip(both, both[len(both) // 2 :], strict=False))
