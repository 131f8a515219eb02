"""The whole pipeline, readable in one place, and `rewrite`, which every entry point calls to run it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator

from torch import fx

from ampgraph._compat import HigherOrderOperator, OpOverload, tracing_lock, without_new_guards
from ampgraph.errors import PassError
from ampgraph.guards import FP16, FP32, guard_of, set_guard
from ampgraph.marks import (
    META_KEY,
    DecisionMark,
    InputMark,
    Mark,
    input_mark,
    mark_of,
    set_input_mark,
    set_mark,
)
from ampgraph.ops.lists import OpClass
from ampgraph.plan import Plan
from ampgraph.policy.policy import Policy
from ampgraph.policy.rules import ModulePaths

from .analysis.bodies import bodies_of
from .analysis.facts import tensors
from .analysis.precision import Precision
from .analysis.ranges import is_table
from .base import Hook, Pass, Pins, Workspace, run_passes, workspace
from .choose_gradients import ChooseGradients
from .choose_saved import ChooseSaved
from .classify import ClassifyOps
from .clean_casts import CleanCasts
from .fold_masks import FoldMasks
from .inline_regions import InlineRegions
from .inline_transforms import InlineTransforms
from .insert_casts import InsertCasts
from .lay_out_masks import LayOutMasks
from .normalize import Normalize
from .place import PlaceCasts
from .precedence import settle_guard_scope
from .propagate import PropagatePrecision
from .verify import Verify


def default_pipeline(
    policy: Policy,
    modules: tuple[ModulePaths, ...] = (),
    check_rules: bool = True,
    pins: Pins = (),
    edits: bool = True,
) -> tuple[Pass, ...]:
    """Returns the pipeline that `ampgraph.convert` runs on a captured graph.

    Args:
        policy: The policy, with its dtype set.
        modules: Module paths of the source model, which rules may name.
        check_rules: Whether a rule that matches nothing is an error.
        pins: See `PropagatePrecision`.
        edits: Whether any node may go low; if not, the graph is planned for its reasons and does not change.
    """
    analysis = (
        ClassifyOps(policy),
        PropagatePrecision(policy, modules, check_rules, pins),
        PlaceCasts(policy),
        ChooseSaved(policy),
        ChooseGradients(policy),
    )
    if policy.level == "O0" or not edits:
        return analysis
    return (
        InlineRegions(policy),
        InlineTransforms(),
        Normalize(),
        FoldMasks(),
        LayOutMasks(),
        *analysis,
        InsertCasts(),
        CleanCasts(),
        Verify(policy.keep_io_dtypes),
    )


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keeps traces of other threads out: sizes that passes compute on would go to their graphs."""
    with tracing_lock(), _paused_collector():
        yield


@contextlib.contextmanager
def _paused_collector() -> Iterator[None]:
    """Pauses the garbage collector.

    The passes allocate many objects that live to the end, and make no cycles. Each collection would visit
    all of them in vain. The pause holds for all threads of the process.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_one_at_a_time()
def rewrite(
    graph_module: fx.GraphModule,
    policy: Policy,
    modules: Iterable[ModulePaths] = (),
    check_rules: bool = True,
    hook: Hook | None = None,
    pins: Pins = (),
) -> Plan:
    """Plans and inserts casts in place, also in the bodies of ``torch.cond`` and similar ops.

    A body keeps the dtypes of its inputs and outputs, so each body is planned separately. A graph without
    casts (level O0, an all-black list) stays equal to the captured graph, node for node.

    Args:
        graph_module: A captured graph; edited in place.
        policy: The policy, with its dtype set.
        modules: Module paths that rules may name.
        check_rules: Whether a rule that matches nothing is an error.
        hook: See `run_passes`.
        pins: See `PropagatePrecision`; not for nodes of bodies.

    Returns:
        The plan.

    Raises:
        PolicyError: The rules do not fit the model.
        PassError: A pass failed; the graph module must not be used then.
    """
    asked, policy = policy, settle_guard_scope(graph_module, policy)
    modules = tuple(modules)
    if policy.level != "O0" and bodies_of(graph_module):
        run_passes(graph_module, (InlineRegions(policy),))  # a region around such an op holds for its body
    for body, callers in bodies_of(graph_module).items():
        _mark_parameters(graph_module, body, callers[0])
        _hand_down_guards(body, callers)
        inside = policy.replace(save_norms_low=False, save_softmax_low=False, wide_weight_gradients=False)
        rewrite(body, inside, modules, check_rules=False)
    graph_module.meta[META_KEY] = Workspace()
    edits = any(asked is Precision.LOW for _, asked in pins) or may_go_low(graph_module.graph, policy)
    with without_new_guards(graph_module.graph):
        run_passes(graph_module, default_pipeline(policy, modules, check_rules, pins, edits), hook)
    space = workspace(graph_module)
    if space.plan is None:
        raise PassError("the pipeline ended without a plan.")
    # Analysis results refer to nodes; the plan, the seconds and the policy stay.
    graph_module.meta[META_KEY] = Workspace(plan=space.plan, seconds=space.seconds, policy=asked)
    _leave_reasons(graph_module.graph, space.plan)
    return space.plan


def _leave_reasons(graph: fx.Graph, plan: Plan) -> None:
    """Stores each decision on its node, for ``print_readable(additional_meta=["ampgraph"])``."""
    for node in graph.nodes:
        decision = plan.decisions.get(node.name)
        if decision and mark_of(node, Mark) is None:
            set_mark(node, DecisionMark(decision.by, decision.reason))


def may_go_low(graph: fx.Graph, policy: Policy) -> bool:
    """Whether any node in the graph could run low; otherwise the pipeline has nothing to do."""
    if policy.level == "O0":
        return False
    if "low" in policy.rules.values():
        return True
    return any(_may_go_low(node, policy) for node in graph.nodes)


def _may_go_low(node: fx.Node, policy: Policy) -> bool:
    if guard_of(node) == FP16 or any(t.dtype == policy.low_dtype for t in tensors(node)):
        return True
    if isinstance(node.target, HigherOrderOperator):
        return True
    rule = policy.ops.lookup(node.target) if isinstance(node.target, OpOverload) else None
    return rule is not None and (rule.cls is not OpClass.BLACK or policy.level == "O3")


def _hand_down_guards(body: fx.GraphModule, callers: list[fx.Node]) -> None:
    """Gives ops of a body the guard around the ops that run it; float32 if the guards differ."""
    around = {guard_of(node) for node in callers}
    guard = around.pop() if len(around) == 1 else FP32 if FP32 in around else None
    for node in body.graph.nodes:
        if guard and node.op == "call_function" and not guard_of(node):
            set_guard(node, guard)


def _mark_parameters(graph_module: fx.GraphModule, body: fx.GraphModule, caller: fx.Node) -> None:
    inputs = body.graph.find_nodes(op="placeholder")
    operands = [n for n in caller.all_input_nodes if n.op != "get_attr" or "val" in n.meta]
    for inner, outer in zip(reversed(inputs), reversed(operands), strict=False):
        known = input_mark(inner)
        is_parameter = outer.op == "get_attr" or input_mark(outer).is_parameter
        table = known.is_table or is_table(graph_module, outer)
        set_input_mark(inner, InputMark(known.is_parameter or is_parameter, table, known.peak))
