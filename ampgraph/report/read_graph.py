"""Reads a rewritten graph into `ExplanationData`, and plans it again for what-if questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

from torch.fx import GraphModule, Node

from ..errors import AmpGraphError
from ..marks import META_KEY, ClampMark, mark_of
from ..ops.lists import OpLists
from ..origin import beside_users, module_names, module_stack
from ..passes import Pins
from ..passes.analysis.precision import Precision
from ..plan import Cost, Plan
from ..policy.policy import Policy
from ..policy.rules import ModulePaths
from ..runtime.coverage import Coverage
from . import graph_view as view
from .advice import advise
from .converted import Converted
from .explanation_data import ExplanationData
from .replan import replanned
from .rows import CastRow, NodeRow, Totals

# Decisions that no guard, rule or list can change.
_UNFLIPPABLE = ("source", "user cast", "alias", "kernel", "range")
# Settings that change gradients alone, and the step of `Source.shares` for each.
_STEPS = {
    "save_norms_low": "saved norms",
    "save_softmax_low": "saved softmax",
    "wide_weight_gradients": "weight gradients",
}
_PEERS: dict[str, Callable[[], OpLists]] = {
    "torch": OpLists.torch,
    "paddle": OpLists.paddle,
    "mindspore": OpLists.mindspore,
    "oneflow": OpLists.oneflow,
}


def source_of(amp: object) -> tuple[Source, str]:
    """Returns the graph of a converted model, or of its graph module, and which of the model's graphs it is.

    Raises:
        AmpGraphError: It is neither, or not captured yet.
    """
    if isinstance(amp, Converted):
        modules = module_names(amp.source)
        name, stores_low = view.graph_name(amp), _stores_low(amp)
        graph_module, plan, position = _current(amp)
        return Source(graph_module, plan, amp.policy, name, modules, stores_low, amp.coverage), position
    graph_module, plan = view.rewritten(amp)
    return Source(graph_module, plan, _policy_of(graph_module), view.graph_name(amp)), ""


@dataclass(frozen=True)
class Source:
    """A rewritten graph with the data to plan it again.

    Attributes:
        graph_module: The graph; read, never changed.
        plan: Its plan.
        policy: The policy of the plan.
        model: Name of the model that it came from.
        modules: Module paths that rules may name.
        stores_low: Whether level O3 stores its parameters low, or would if it converted the model now.
        coverage: The share of the model inside its graphs.
    """

    graph_module: GraphModule
    plan: Plan
    policy: Policy
    model: str
    modules: tuple[ModulePaths, ...] = ()
    stores_low: bool = False
    coverage: Coverage | None = None

    def under(self, policy: Policy | str | PathLike[str]) -> Source:
        """See `Explanation.under`."""
        policy = Policy.of(policy)
        policy = policy.replace(dtype=policy.dtype or self.plan.low_dtype)
        if policy.objective == "auto":
            policy = policy.replace(objective=self.policy.objective)
        return self._planned(policy, check_rules=True)

    def flipped(self, name: str) -> Source:
        """See `Explanation.flip`."""
        node = next(n for n in self.graph_module.graph.nodes if n.name == name)
        owner = node.args[0].name if view.is_item(node) else name  # type: ignore[union-attr]
        decision = self.plan.decisions.get(owner)
        if decision is None or decision.dtype is None or decision.by in _UNFLIPPABLE:
            why = f"{decision.by}: {decision.reason}" if decision else "it is not an op of the source model"
            raise AmpGraphError(f"no policy can flip {name!r} ({why}).")
        return self._planned(
            self.policy, pins=((owner, Precision.of(decision.dtype, self.plan.low_dtype).other),)
        )

    def peers(self) -> dict[str, Totals]:
        """See `Explanation.peers`."""
        policies = {
            name: self.policy.replace(level="O1", ops=lists(), placement="autocast", hazards=False)
            for name, lists in _PEERS.items()
        }
        plans = {name: replanned(self.graph_module, self.plan, p)[1] for name, p in policies.items()}
        return {name: _from_cost(plan.baselines["autocast"]) for name, plan in plans.items()}

    def shares(self) -> dict[str, Totals]:
        """See `Explanation.shares`."""
        rule = replanned(
            self.graph_module,
            self.plan,
            self.policy.replace(placement="autocast"),
            self.modules,
            stores_low=self.stores_low,
        )[1]
        plan = self.plan
        chosen = dict(zip(_STEPS, (plan.saved_low, plan.saved_softmax, plan.wide_gradients), strict=True))
        used = [switch for switch, nodes in chosen.items() if nodes]
        found = {
            "torch.autocast": self.peers()["torch"],
            "lists": _from_cost(self.plan.baselines["autocast"]),
            "sharing": _from_cost(rule.cost),
        }
        for count, step in enumerate(("placement", *(_STEPS[switch] for switch in used))):
            policy = self.policy.replace(**dict.fromkeys(used[count:], False))
            found[step] = _from_cost(self._planned(policy).plan.cost if used[count:] else self.plan.cost)
        return found

    def _planned(self, policy: Policy, check_rules: bool = False, pins: Pins = ()) -> Source:
        planned = replanned(
            self.graph_module, self.plan, policy, self.modules, check_rules, pins, self.stores_low
        )
        return Source(*planned, policy, self.model, self.modules, self.stores_low, self.coverage)

    def bodies(self) -> dict[str, Source]:
        """Returns the bodies of the graph's higher-order ops, by name."""
        return {
            body.prefix.removesuffix("/"): Source(body.module, body.plan, self.policy, self.model)
            for body in view.with_bodies(self.graph_module, self.plan)
            if body.prefix.count("/") == 1
        }

    def read(self, graph: str = "") -> ExplanationData:
        """Reads the graph; ``graph`` says which of the model's it is."""
        graph_module, plan = self.graph_module, self.plan
        modules = _modules(graph_module)
        casts = tuple(_cast_row(node, plan, modules[node]) for node in view.inserted_casts(graph_module))
        widened = _widened(graph_module, plan)
        own_casts = view.own_casts(graph_module)
        nodes = tuple(
            _node_row(node, plan, tuple(widened.get(node.name, ())), modules[node])
            for node in graph_module.graph.nodes
            if view.kind_of(node) != "cast"
        )
        return ExplanationData(
            model=self.model,
            policy=repr(self.policy),
            low_dtype=view.dtype_name(plan.low_dtype),
            graph=graph,
            bodies={name: body.read() for name, body in self.bodies().items()},
            nodes=nodes,
            casts=casts,
            totals=_totals(casts, plan),
            baselines={name: _from_cost(plan.baselines[name]) for name in sorted(plan.baselines)},
            widened=sum(map(len, widened.values())),
            gap=plan.gap,
            advice=advise(graph_module, plan),
            keeps_low_copies=self.policy.keeps_low_copies,
            coverage=self.coverage,
            own_casts=len(own_casts),
            own_cast_bytes=sum(map(view.cast_bytes, own_casts)),
        )


def _stores_low(amp: Converted) -> bool:
    if amp.policy.level == "O3":
        return bool(amp.stored_low)
    return not (amp.training or amp.is_just_in_time)


def _policy_of(graph_module: GraphModule) -> Policy:
    policy = graph_module.meta[META_KEY].policy
    assert policy is not None  # `view.rewritten` accepts only what `rewrite` left
    return policy


def _current(amp: Converted) -> tuple[GraphModule, Plan, str]:
    """Returns the current graph, its plan, and which of the model's graphs it is, as ``"1 of 2"``.

    A graph from before a change of the model's parts is none of them; then the text is empty.
    """
    graph_module, plan = amp.graph_module, amp.plan
    while amp.graph_module is not graph_module:  # another thread called the model meanwhile
        graph_module, plan = amp.graph_module, amp.plan
    graphs = amp.graph_modules
    places = [at for at, graph in enumerate(graphs, 1) if graph is graph_module]
    return graph_module, plan, f"{places[0]} of {len(graphs)}" if places else ""


def _widened(graph_module: GraphModule, plan: Plan) -> dict[str, list[str]]:
    """Returns, by node, the operands that are low in the graph and that the kernel widens."""
    nodes = {node.name: node for node in graph_module.graph.nodes}
    found: dict[str, list[str]] = {}
    for use in plan.widened:
        operand = view.argument_at(nodes[use.node], use.path) if use.node in nodes else None
        if operand is not None and view.dtype_of(operand) == view.dtype_name(plan.low_dtype):
            found.setdefault(use.node, []).append(view.label_of(operand))
    return found


def _modules(graph_module: GraphModule) -> dict[Node, str]:
    """Returns the innermost module of every node; an inserted node takes the module of its users."""
    nodes = list(graph_module.graph.nodes)
    moved = [node for node in nodes if view.kind_of(node) in ("cast", "clamp")]
    stacks = {node: module_stack(node) for node in nodes}
    found = beside_users(stacks, {node: list(node.users) for node in moved}, moved)
    return {node: stack[-1] if stack else "" for node, stack in found.items()}


def _node_row(node: Node, plan: Plan, widens: tuple[str, ...], module: str) -> NodeRow:
    decision = plan.decisions.get(node.name)
    clamp = mark_of(node, ClampMark)
    reads = dict.fromkeys(source.name for _, source in view.operands(node) if view.kind_of(source) == "cast")
    return NodeRow(
        name=node.name,
        label=view.label_of(node),
        kind=view.kind_of(node),
        op=view.op_name(node),
        module=module,
        dtype=view.dtype_of(node),
        shape=view.shape_of(node),
        op_class=(decision.op_class or "") if decision else "",
        by=decision.by if decision else (clamp.clamped if clamp else ""),
        reason=decision.reason if decision else (clamp.reason if clamp else ""),
        line=view.user_line(node),
        reads_cast=tuple(reads),
        widens=widens,
        because=decision.because if decision else (),
    )


def _cast_row(node: Node, plan: Plan, module: str) -> CastRow:
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
        module=module,
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
        **_step(plan.cost),
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
        **_step(cost),
    )


def _step(cost: Cost) -> dict[str, int]:
    names = ("backward", "saved", "fused_forward", "fused_backward", "fused_saved")
    return {name: getattr(cost, name) for name in names}
