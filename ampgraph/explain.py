"""`explain`: what runs in which dtype, who decided so, and what the casts cost."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from . import graph_view as view
from .explanation import CastRow, Explanation, NodeRow, Totals
from .module import AmpModule
from .module_path import module_path
from .plan import META_KEY, Cost, Plan


def explain(amp: AmpModule | GraphModule) -> Explanation:
    """Explains a converted model: every node's dtype and reason, every cast, and the totals.

    Everything is read off the rewritten graph itself; reasons and modelled traffic come from its plan.

    Args:
        amp: What `ampgraph.convert` returned, or the graph module of one. An `AmpModule` with several
            graphs is explained by the one that ran last; the others are in ``amp.graph_modules``.

    Raises:
        AmpGraphError: It is neither, or not captured yet.

    Example:
        >>> print(ampgraph.explain(amp))
        >>> print(ampgraph.explain(amp).why("linear"))
    """
    graph_module, plan = view.rewritten(amp)
    return _explanation(amp, graph_module, plan)


def _explanation(amp: AmpModule | GraphModule, graph_module: GraphModule, plan: Plan) -> Explanation:
    casts = tuple(_cast_row(node, plan) for node in view.inserted_casts(graph_module))
    widened = _widened(graph_module, plan)
    nodes = tuple(
        _node_row(node, plan, tuple(widened.get(node.name, ())))
        for node in graph_module.graph.nodes
        if view.kind_of(node) != "cast"
    )
    return Explanation(
        model=view.graph_name(amp),
        policy=repr(amp.policy) if isinstance(amp, AmpModule) else "",
        low_dtype=view.dtype_name(plan.low_dtype),
        graph=_position(amp, graph_module),
        bodies={
            graph.prefix.removesuffix("/"): _explanation(graph.module, graph.module, graph.plan)
            for graph in view.with_bodies(graph_module, plan)
            if graph.prefix.count("/") == 1
        },
        nodes=nodes,
        casts=casts,
        totals=_totals(casts, plan),
        baselines={name: _from_cost(plan.baselines[name]) for name in sorted(plan.baselines)},
        widened=sum(map(len, widened.values())),
        optimal=plan.optimal and not (isinstance(amp, AmpModule) and amp.policy.placement == "autocast"),
    )


def _position(amp: object, graph_module: GraphModule) -> str:
    if not isinstance(amp, AmpModule):
        return ""
    return f"{amp.graph_modules.index(graph_module) + 1} of {len(amp.graph_modules)}"


def _widened(graph_module: GraphModule, plan: Plan) -> dict[str, list[str]]:
    """Returns, by node, the operands that are really low in the graph and widened by the kernel."""
    nodes = {node.name: node for node in graph_module.graph.nodes}
    found: dict[str, list[str]] = {}
    for use in plan.widened:
        operand = view.argument_at(nodes[use.node], use.path) if use.node in nodes else None
        if operand is not None and view.dtype_of(operand) == view.dtype_name(plan.low_dtype):
            found.setdefault(use.node, []).append(view.label_of(operand))
    return found


def _node_row(node: Node, plan: Plan, widens: tuple[str, ...]) -> NodeRow:
    decision = plan.decisions.get(node.name)
    meta = node.meta[META_KEY] if view.kind_of(node) == "clamp" else {}
    reads = dict.fromkeys(source.name for _, source in view.operands(node) if view.kind_of(source) == "cast")
    return NodeRow(
        name=node.name,
        label=view.label_of(node),
        kind=view.kind_of(node),
        op=view.op_name(node),
        module=module_path(node),
        dtype=view.dtype_of(node),
        shape=view.shape_of(node),
        op_class=(decision.op_class or "") if decision else "",
        by=decision.by if decision else meta.get("clamped", ""),
        reason=decision.reason if decision else meta.get("reason", ""),
        line=view.user_line(node),
        reads_cast=tuple(reads),
        widens=widens,
    )


def _cast_row(node: Node, plan: Plan) -> CastRow:
    source = view.cast_source(node)
    users = list(node.users)
    return CastRow(
        name=node.name,
        tensor=view.label_of(source),
        src=view.dtype_of(source),
        dst=view.dtype_of(node),
        shape=view.shape_of(node),
        bytes=view.cast_bytes(node),
        is_parameter=view.is_parameter_cast(node),
        clamped=view.is_clamped(node),
        users=tuple(view.label_of(user) for user in users),
        src_reason=_reason(source, plan),
        dst_reason="graph output keeps its dtype" if users[0].op == "output" else _reason(users[0], plan),
    )


def _reason(node: Node, plan: Plan) -> str:
    decision = plan.decisions.get(node.name)
    return decision.reason if decision else ""


def _totals(casts: tuple[CastRow, ...], plan: Plan) -> Totals:
    parameters = [c.bytes for c in casts if c.is_parameter]
    activations = [c.bytes for c in casts if not c.is_parameter]
    moved = sum(parameters) + sum(activations)
    return Totals(
        casts=len(casts),
        activation_casts=len(activations),
        parameter_casts=len(parameters),
        cast_bytes=moved,
        activation_cast_bytes=sum(activations),
        parameter_cast_bytes=sum(parameters),
        # The clean-up may have removed a planned cast.
        traffic=plan.cost.traffic - plan.cost.cast_bytes + moved,
    )


def _from_cost(cost: Cost) -> Totals:
    return Totals(
        casts=cost.casts,
        activation_casts=cost.activation_casts,
        parameter_casts=cost.casts - cost.activation_casts,
        cast_bytes=cost.cast_bytes,
        activation_cast_bytes=cost.activation_cast_bytes,
        parameter_cast_bytes=cost.cast_bytes - cost.activation_cast_bytes,
        traffic=cost.traffic,
    )
