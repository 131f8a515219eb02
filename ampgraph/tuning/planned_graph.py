"""`PlannedGraph`: one graph of a model, planned under many policies without being edited."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from torch.fx import GraphModule, Node

from ..marks import META_KEY
from ..numerics.neighbours import Neighbours, is_changeable
from ..numerics.run_model import Part
from ..passes import ClassifyOps, PropagatePrecision, Workspace, run_passes, workspace
from ..passes.analysis.alias import written_memory
from ..passes.analysis.facts import DECIDED
from ..passes.analysis.graph_walk import values_read
from ..passes.analysis.precision import FP32
from ..passes.analysis.problem import Problem
from ..passes.analysis.range_hazards import Values
from ..passes.place import place
from ..passes.placement.amounts import moved
from ..passes.placement.cost_model import cost_of
from ..passes.placement.labelling import Placement
from ..policy.policy import Policy
from ..report.graph_view import with_bodies


class PlannedGraph:
    """One graph without casts, and the plans that policies make for it.

    The unit of rounding is a *tensor*: what one op makes, and all that clear ops pass on of it. It is rounded
    if its maker runs low, and for one of its readers if that reader runs low.

    Args:
        part: The graph, rewritten under the policy.
        policy: The policy that rules are added to.
    """

    def __init__(self, part: Part, policy: Policy):
        self.part, self.policy = part, policy
        self.graph_module: GraphModule = part.float32
        run_passes(self.graph_module, (ClassifyOps(policy),))
        self._facts = workspace(self.graph_module).facts
        self._values: Values | None = None
        self.nodes = {node.name: node for node in self.graph_module.graph.nodes}
        self.roots = Neighbours(part).roots

    @cached_property
    def problem(self) -> Problem:
        """What the policy leaves to placement."""
        return self._analyse(self.policy)

    @cached_property
    def payers(self) -> dict[Node, frozenset[Node]]:
        """The nodes that round each tensor if they run low."""
        found: dict[Node, set[Node]] = defaultdict(set)
        for node, variable in self.problem.variables.items():
            if variable.pinned is FP32 or node.op != "call_function":
                continue
            operands = self.problem.facts[node].operands
            for tensor in (node, *(o.tensor for o in operands if o.rule in DECIDED)):
                for root in self.roots[tensor]:
                    found[root].add(node)
        return {root: frozenset(nodes) for root, nodes in found.items()}

    @cached_property
    def reads(self) -> dict[tuple[Node, Node], frozenset[Node]]:
        """By (tensor, reader), if several nodes read the tensor: the nodes that round it for this reader."""
        readers, written = self._readers(), written_memory(self.graph_module.graph)
        shared = [root for root in self.payers if root not in written and len(readers[root]) > 1]
        found = {}
        for root in shared:
            for reader, ways in readers[root].items():
                if all(self.roots[way] == (root,) for way in ways):
                    passing = {node for way in ways for node in self._way(root, way)}
                    found[root, reader] = self.payers[root] & {root, reader, *passing}
        return found

    def _readers(self) -> dict[Node, dict[Node, set[Node]]]:
        """Returns who reads each tensor, and which nodes each reads it through."""
        readers: dict[Node, dict[Node, set[Node]]] = defaultdict(lambda: defaultdict(set))
        computing = (n for n in self.nodes.values() if n.op == "call_function" and self.roots[n] == (n,))
        for reader in computing:
            for read in values_read(reader):
                for root in self.roots[read]:
                    readers[root][reader].add(read)
        return readers

    def _way(self, root: Node, read: Node) -> set[Node]:
        """Returns the clear ops between a tensor's maker and what a node reads of it."""
        found: set[Node] = set()
        waiting = [read]
        while waiting:
            node = waiting.pop()
            if node is not root and node not in found and root in self.roots[node]:
                found.add(node)
                waiting += node.all_input_nodes
        return found

    @cached_property
    def everything(self) -> frozenset[str]:
        """The names of all ops that may run low, those in bodies of higher-order ops included."""
        names = {node.name for payers in self.payers.values() for node in payers}
        bodies = [g for g in with_bodies(self.part.graph_module, self.part.plan) if g.prefix]
        names |= {n.name for body in bodies for n in body.module.graph.nodes if is_changeable(n, body.plan)}
        return frozenset(names)

    def placed(self, rules: dict[str, str]) -> Placement:
        """Returns the labels that a plan under the policy with other rules gives."""
        policy = self.policy.replace(rules=rules)
        return place(self._analyse(policy), policy)

    def _analyse(self, policy: Policy) -> Problem:
        space = Workspace(facts=self._facts, values=self._values)
        self.graph_module.meta[META_KEY] = space
        run_passes(self.graph_module, (PropagatePrecision(policy, self.part.modules, check_rules=False),))
        assert space.problem is not None
        self._values = space.values
        return space.problem

    @property
    def stores_low(self) -> bool:
        """Whether a forward reads low copies of parameters, instead of casting them."""
        return self.policy.keeps_low_copies

    def traffic(self, placement: Placement) -> int:
        """Returns the bytes that a forward moves."""
        cost = cost_of(self.problem, placement.labels, placement.anchors)
        return moved(cost, self.stores_low)
