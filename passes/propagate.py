"""Decides what is not a matter of cost: pins by precedence, and everything that follows from a pin.

Analysis only. Precedence, highest first: a dtype that the source names (a cast the user wrote);
guards; rules; hazards; op lists; propagation. Two facts stand above all of them, because no preference can
change them: an op without a low-precision kernel, and a value that the low dtype cannot hold.

What is left free is for `PlaceCasts` to choose, under two constraints that make O1 safe:

- ``follows``: low only if all its floating inputs are low (gray ops; clear ops in general);
- ``narrowable``: every consumer, through further clear ops, is low anyway, so the value may be
  rounded here instead of there. Clear ops need not follow then, and a black op whose low kernel
  computes in float32 and rounds once may write its result in low.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from ampgraph._compat import OpOverload
from ampgraph.guards import FP16, FP32, LISTS, guard_of
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass
from ampgraph.origin import module_paths_of
from ampgraph.policy.policy import Policy
from ampgraph.policy.rules import RuleBook

from .analysis.arguments import argument
from .analysis.facts import Facts, NodeFacts, OperandRule, has_kernel
from .analysis.hazards import Hazard, find_hazards
from .analysis.problem import Problem, Variable, force_followers
from .analysis.ranges import find_range_pins
from .base import Pass, Pins, workspace


@dataclass(frozen=True)
class PropagatePrecision(Pass):
    """See the module docstring.

    Attributes:
        policy: Level, lists, rules and guards.
        low_dtype: The policy's low dtype.
        modules: Module paths of the source model, for rules; checked when ``check_rules``.
        pins: Labels by node name that stand above every wish (guards, rules, lists): for asking what if.
    """

    policy: Policy
    low_dtype: torch.dtype
    modules: tuple[str, ...] = ()
    check_rules: bool = True
    pins: Pins = ()
    name: ClassVar[str] = "propagate"
    edits: ClassVar[bool] = False

    def requires(self, graph_module: GraphModule) -> None:
        if not self.check_rules:
            return
        self._rules(graph_module).check(n.name for n in graph_module.graph.nodes)

    def run(self, graph_module: GraphModule) -> bool:
        space = workspace(graph_module)
        assert space.facts is not None
        facts = space.facts
        problem = Problem({}, facts, self.low_dtype)
        guarded_only = self._guarded_only(graph_module)
        rules = self._rules(graph_module)
        ranges, problem.out_of_range = find_range_pins(graph_module, facts, self.low_dtype)
        fixed: dict[Node, Variable] = {}
        for node, fact in facts.items():
            if fact.dtype is None or fact.dtype_source is not node:
                continue
            if variable := self._above_lists(node, fact, ranges.get(node), guarded_only, rules):
                fixed[node] = variable
        hazards = self._hazards(graph_module, facts, fixed)
        for node, fact in facts.items():
            if fact.dtype is None or fact.dtype_source is not node:
                continue
            listed = fixed.get(node) or self._by_lists(node, fact)
            exact = None if node in fixed else self._by_hazard(hazards.get(node), fact, listed)
            problem.variables[node] = exact or listed
        _index_uses(problem)
        self._constrain(problem)
        force_followers(problem)
        space.problem = problem
        return False

    def _guarded_only(self, graph_module: GraphModule) -> bool:
        if self.policy.use_fp16_guard is not None:
            return self.policy.use_fp16_guard
        return any(guard_of(n) == FP16 for n in graph_module.graph.nodes)

    def _above_lists(
        self, node: Node, fact: NodeFacts, range_reason: str | None, guarded_only: bool, rules: RuleBook
    ) -> Variable | None:
        """Applies what stands above hazards and op lists to one node; None if nothing of it speaks."""
        source_low = fact.dtype == self.low_dtype
        if self.policy.level == "O0":
            return Variable(source_low, "source", "O0 changes nothing")
        if node.op in ("placeholder", "get_attr"):
            return Variable(source_low, "source", f"{node.op} of the source model")
        if fact.fixed_dtype is not None:
            return Variable(source_low, "user cast", "the source names this dtype")
        if fact.mutated:
            return Variable(source_low, "alias", "its memory is written in place")
        if fact.reads_whole_storage:
            return Variable(source_low, "alias", "as_strided reads its memory beyond a view of it")
        if fact.returned_input_view:
            return Variable(source_low, "alias", "a view of the caller's own memory, returned")
        if node.target is operator.getitem:
            return Variable(source_low, "kernel", "a result in a dtype of its own, whatever the op runs in")
        if not isinstance(node.target, OpOverload):
            return Variable(source_low, "kernel", "not an ATen op")
        if fact.reads_sparse:
            return Variable(source_low, "kernel", "reads a sparse or nested tensor")
        if fact.reads_other_low:
            return Variable(source_low, "kernel", "reads another low dtype, with which this one widens")
        if kernels.is_opaque(node.target):
            return Variable(source_low, "kernel", "FakeTensor cannot tell what it yields from other dtypes")
        if not has_kernel(node, self.low_dtype):
            return Variable(False, "kernel", "no low-precision kernel")
        if fact.refuses_low:
            return Variable(False, "kernel", fact.refuses_low)
        if (sparse := kernels.sparse_gradient_arg(node.target)) and argument(node, sparse):
            return Variable(source_low, "kernel", "the gradient of its weight is sparse")
        if range_reason:
            return Variable(False, "range", range_reason)
        if not any(s.follow for s in fact.operands):
            return Variable(source_low, "source", "makes its values from no floating input")
        if (asked := dict(self.pins).get(node.name)) is not None:
            return Variable(asked, "what if", "flipped, to see what changes")
        return self._wished(node, guarded_only, rules)

    def _hazards(
        self, graph_module: GraphModule, facts: Facts, fixed: dict[Node, Variable]
    ) -> dict[Node, Hazard]:
        if not self.policy.hazards or self.policy.level == "O0":
            return {}
        labels = {node: v.pinned for node, v in fixed.items() if v.pinned is not None}
        return find_hazards(graph_module, facts, labels, self.low_dtype)

    def _by_hazard(self, hazard: Hazard | None, fact: NodeFacts, listed: Variable) -> Variable | None:
        """Keeps an exact node in the source's dtype, unless what the lists say does that anyway."""
        source_low = fact.dtype == self.low_dtype
        if hazard is None or listed.pinned == source_low or (listed.follows and not source_low):
            return None
        return Variable(source_low, "hazard", hazard.reason, because=hazard.because)

    def _wished(self, node: Node, guarded_only: bool, rules: RuleBook) -> Variable | None:
        guard = guard_of(node)
        if guard == FP32:
            return Variable(False, "guard", "inside fp32_guard (or a disabled autocast region)")
        if guard == FP16 and self.policy.use_fp16_guard is not False:
            return Variable(True, "guard", "inside fp16_guard")
        if guarded_only and guard != LISTS:
            return Variable(False, "guard", "outside fp16_guard")
        if match := rules.match(node.name, module_paths_of(node)):
            reason = f"rule {match.pattern!r}: {match.value!r} matches {match.name!r}"
            return Variable(match.value == "low", "rule", reason)
        return None

    def _rules(self, graph_module: GraphModule) -> RuleBook:
        """Returns the rules; a graph whose model is not known is asked for the modules that it comes from."""
        if not self.policy.rules:
            return RuleBook({}, ())
        around = (path for node in graph_module.graph.nodes for path in module_paths_of(node))
        return RuleBook(self.policy.rules, self.modules or around)

    def _by_lists(self, node: Node, fact: NodeFacts) -> Variable:
        cls, why = fact.op_class, f": {fact.class_reason}" if fact.class_reason else ""
        if cls is None:
            return Variable(False, "list", "in no op list")
        if cls is OpClass.WHITE:
            return Variable(True, "list", f"white{why}")
        if self.policy.level == "O3" and cls is OpClass.BLACK:
            return Variable(True, "list", "O3 runs everything low")
        if cls is OpClass.BLACK:
            return Variable(False, "list", f"black{why}")
        return Variable(None, "placement", cls.value, follows=self.policy.level == "O1")

    def _constrain(self, problem: Problem) -> None:
        """Finds the narrowable nodes, from the graph's end to its beginning."""
        narrowable: set[Node] = set()
        for node in reversed(list(problem.variables)):
            variable, fact = problem.variables[node], problem.facts[node]
            rounds = variable.by == "list" and fact.op_class is OpClass.BLACK and variable.pinned is False
            rounds = rounds and isinstance(node.target, OpOverload) and kernels.rounds_once(node.target)
            clear = variable.pinned is None and fact.op_class is OpClass.CLEAR
            if not (rounds or clear) or not _consumers_are_low(node, problem, narrowable):
                continue
            if clear:
                narrowable.add(node)
                variable.follows, variable.narrowable = False, True
                continue
            problem.variables[node] = Variable(
                None,
                "placement",
                f"{variable.reason}; its kernel rounds once, for low consumers",
                follows=True,
            )


def _index_uses(problem: Problem) -> None:
    for node, fact in problem.facts.items():
        for index, operand in enumerate(fact.operands):
            problem.uses.setdefault(operand.tensor, []).append((node, index))


def _outputs(node: Node, problem: Problem) -> list[Node]:
    """Returns the managed tensors that an op produces: itself, or the getitems on its tuple."""
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return [node]
    return [u for u in node.users if problem.facts[u].dtype_source is node and problem.facts[u].dtype]


def _consumers_are_low(node: Node, problem: Problem, narrowable: set[Node]) -> bool:
    uses = [
        (user, problem.facts[user].operands[i])
        for t in _outputs(node, problem)
        for user, i in problem.uses.get(t, ())
    ]
    return bool(uses) and all(
        _is_low_anyway(user, operand.rule, problem, narrowable) for user, operand in uses
    )


def _is_low_anyway(user: Node, rule: OperandRule, problem: Problem, narrowable: set[Node]) -> bool:
    if (
        rule not in (OperandRule.NODE_DTYPE, OperandRule.PROMOTED, OperandRule.DTYPE_ARG)
        or user not in problem.variables
    ):
        return False
    return problem.variables[user].pinned is True or user in narrowable
