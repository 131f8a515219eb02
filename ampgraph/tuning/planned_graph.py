"""`PlannedGraph`: one graph of a model, planned under many policies without being edited."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from torch.fx import GraphModule, Node

from ..marks import META_KEY
from ..numerics.neighbours import Neighbours, is_changeable
from ..numerics.run_model import Part
from ..passes import ClassifyOps, PlaceCasts, PropagatePrecision, Workspace, run_passes, workspace
from ..passes.analysis.facts import OperandRule
from ..passes.analysis.precision import FP32
from ..passes.analysis.problem import Problem
from ..passes.placement.amounts import moved
from ..plan import Plan
from ..policy.policy import Policy
from ..report.graph_view import with_bodies

# Through these, an op that runs low reads low.
NARROWED = (OperandRule.NODE_DTYPE, OperandRule.PROMOTED, OperandRule.DTYPE_ARG)


class PlannedGraph:
    """One graph without casts, and the plans that policies make for it.

    The unit of rounding is a *tensor*: what one op makes, and all that clear ops pass on of it. It is rounded
    if its maker or any of its readers runs low.

    Args:
        part: The graph, rewritten under the policy.
        policy: The policy that rules are added to.
    """

    def __init__(self, part: Part, policy: Policy):
        self.part, self.policy = part, policy
        self.graph_module: GraphModule = part.float32
        run_passes(self.graph_module, (ClassifyOps(policy),))
        self._facts = workspace(self.graph_module).facts
        self.nodes = {node.name: node for node in self.graph_module.graph.nodes}
        self.roots = Neighbours(part).roots

    @cached_property
    def problem(self) -> Problem:
        """What the policy leaves to placement."""
        self._analyse(self.policy)
        found = workspace(self.graph_module).problem
        assert found is not None
        return found

    @cached_property
    def payers(self) -> dict[Node, frozenset[Node]]:
        """The nodes that round each tensor if they run low."""
        found: dict[Node, set[Node]] = defaultdict(set)
        for node, variable in self.problem.variables.items():
            if variable.pinned is FP32 or node.op != "call_function":
                continue
            operands = self.problem.facts[node].operands
            for tensor in (node, *(o.tensor for o in operands if o.rule in NARROWED)):
                for root in self.roots[tensor]:
                    found[root].add(node)
        return {root: frozenset(nodes) for root, nodes in found.items()}

    @cached_property
    def everything(self) -> frozenset[str]:
        """The names of all ops that may run low, those in bodies of higher-order ops included."""
        names = {node.name for payers in self.payers.values() for node in payers}
        bodies = [g for g in with_bodies(self.part.graph_module, self.part.plan) if g.prefix]
        names |= {n.name for body in bodies for n in body.module.graph.nodes if is_changeable(n, body.plan)}
        return frozenset(names)

    def plan(self, rules: dict[str, str]) -> Plan:
        """Returns the plan under the policy with other rules."""
        policy = self.policy.replace(rules=rules)
        self._analyse(policy, PlaceCasts(policy))
        found = workspace(self.graph_module).plan
        assert found is not None
        return found

    def _analyse(self, policy: Policy, *more: PlaceCasts) -> None:
        self.graph_module.meta[META_KEY] = Workspace(facts=self._facts)
        passes = (PropagatePrecision(policy, self.part.modules, check_rules=False), *more)
        run_passes(self.graph_module, passes)

    @property
    def stores_low(self) -> bool:
        """Whether a forward reads low copies of parameters, instead of casting them."""
        return self.policy.keeps_low_copies

    def traffic(self, plan: Plan) -> int:
        """Returns the bytes that a forward moves."""
        return moved(plan.cost, self.stores_low)

    def rounded(self, plan: Plan) -> set[Node]:
        """Returns the tensors that a plan rounds."""
        low = [name for name, decision in plan.decisions.items() if decision.dtype == plan.low_dtype]
        low += [cast.tensor for cast in plan.casts if cast.dst == plan.low_dtype]
        return {root for name in low if name in self.nodes for root in self.roots[self.nodes[name]]}
