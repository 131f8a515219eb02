"""Pins nodes by precedence, and all nodes that follow from a pin, independent of cost.

Analysis only. `precedence.PRECEDENCE` lists the rules, highest first.

`PlaceCasts` chooses the dtype of free nodes under two constraints that make O1 safe:

- ``follows``: low only if all its floating inputs are low (gray ops; clear ops in general);
- ``narrowable``: every consumer, through further clear ops, is low anyway, so the value may be rounded
  here instead. Clear ops then need not follow, and a black op whose low kernel computes in float32 and
  rounds once may write its result low.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from ampgraph._compat import OpOverload
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass
from ampgraph.origin import module_paths_of, names_of
from ampgraph.policy.policy import Policy
from ampgraph.policy.rules import ModulePaths, RuleBook

from .analysis.carried import find_carried
from .analysis.facts import DECIDED, OperandRule
from .analysis.hazards import find_hazards
from .analysis.losses import find_loss_terms
from .analysis.magnified import find_magnified
from .analysis.precision import Precision
from .analysis.problem import Hazard, Problem, Variable, force_followers
from .analysis.range_hazards import Values, find_range_hazards
from .analysis.traces import Tracer
from .analysis.widened import find_widened
from .base import Pass, Pins, workspace
from .precedence import ABOVE_HAZARDS, HAZARD, LISTED, Case, settle_by, settle_guard_scope


@dataclass(frozen=True)
class PropagatePrecision(Pass):
    """See the module docstring.

    Attributes:
        policy: Level, lists, rules and guards.
        modules: Module paths of the source model, for rules; checked when ``check_rules``.
        pins: Labels by node name that override guards, rules and lists, for what-if questions.
    """

    policy: Policy
    modules: tuple[ModulePaths, ...] = ()
    check_rules: bool = True
    pins: Pins = ()
    name: ClassVar[str] = "propagate"
    edits: ClassVar[bool] = False

    def requires(self, graph_module: GraphModule) -> None:
        if not self.check_rules:
            return
        self._rules(graph_module).check(*names_of(graph_module.graph))

    def run(self, graph_module: GraphModule) -> bool:
        space = workspace(graph_module)
        assert space.facts is not None
        facts = space.facts
        if space.values is None or space.values.facts is not facts:
            space.values = Values(graph_module, facts, self.policy.low_dtype)
        problem = Problem({}, facts, self.policy.low_dtype, out_of_range=space.values.out_of_range)
        policy = settle_guard_scope(graph_module, self.policy)
        case = Case(policy, self._rules(graph_module), space.values.pins, dict(self.pins))
        decided = [(n, f) for n, f in facts.items() if f.dtype is not None and f.dtype_source is n]
        above = {n: settle_by(ABOVE_HAZARDS, n, f, case) for n, f in decided}
        fixed = {n: variable for n, variable in above.items() if variable is not None}
        case.hazards = self._hazards(graph_module, space.values, fixed)
        for node, fact in decided:
            variable = fixed.get(node) or settle_by((HAZARD, *LISTED), node, fact, case)
            assert variable is not None
            problem.variables[node] = variable
        _index_uses(problem)
        self._constrain(problem)
        force_followers(problem)
        space.problem = problem
        return False

    def _hazards(
        self, graph_module: GraphModule, values: Values, fixed: dict[Node, Variable]
    ) -> dict[Node, Hazard]:
        if not self.policy.hazards or self.policy.level == "O0":
            return {}
        labels = {node: v.pinned for node, v in fixed.items() if v.pinned is not None}
        lowers_black = self.policy.level == "O3"
        tracer = Tracer(graph_module, values.facts, labels, self.policy.low_dtype, lowers_black)
        exact = find_hazards(tracer)
        exact |= find_carried(graph_module.graph, values.facts)
        if self.policy.level == "O3":
            return find_widened(values.facts) | exact
        if self.policy.level == "O2":  # at O1 they follow what they read
            exact |= find_magnified(tracer) | find_loss_terms(tracer)
        return find_range_hazards(values, labels, self.policy.level == "O1") | exact

    def _rules(self, graph_module: GraphModule) -> RuleBook:
        """Returns the rules; without a known model, the modules come from the graph."""
        if not self.policy.rules:
            return RuleBook({}, ())
        around = (path for node in graph_module.graph.nodes for path in module_paths_of(node))
        return RuleBook(self.policy.rules, self.modules or around)

    def _constrain(self, problem: Problem) -> None:
        """Finds the narrowable nodes, from the graph's end to its beginning."""
        narrowable: set[Node] = set()
        for node in reversed(list(problem.variables)):
            variable, fact = problem.variables[node], problem.facts[node]
            rounds = (
                variable.by == "list" and fact.op_class is OpClass.BLACK and variable.pinned is Precision.FP32
            )
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
    if rule not in DECIDED or user not in problem.variables:
        return False
    return problem.variables[user].pinned is Precision.LOW or user in narrowable
