"""Whether rules decide anything, and whether those for node names mean the same ops in every graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from ..errors import did_you_mean, warn_user
from ..origin import is_item, maker_of_item, module_path, module_paths_of, names_of, op_name, user_line
from ..passes.analysis.bodies import runs_bodies
from ..plan import Decision, Plan
from ..policy.policy import Policy
from ..policy.rules import NODE_PREFIX, ModulePaths, RuleBook

# For each pattern, how often it matches an op of a module at a line.
Targets = dict[str, Counter[tuple[str, str, str]]]


def targets_of(
    graph_module: fx.GraphModule,
    plan: Plan,
    rules: Mapping[str, str],
    modules: Iterable[ModulePaths],
) -> Targets:
    """Returns the ops that rules for node names match in a rewritten graph."""
    if not rules:
        return {}
    nodes = {n.name: n for n in graph_module.graph.nodes if n.name in plan.decisions and op_name(n)}
    found = RuleBook(rules, modules).named(nodes)
    return {pattern: Counter(_target(nodes[name]) for name in names) for pattern, names in found.items()}


def _target(node: fx.Node) -> tuple[str, str, str]:
    return module_path(node), op_name(node), user_line(node)


def warn_of_others(model: str, first: Targets, here: Targets, training: bool) -> None:
    """Warns of rules that match other ops in a later graph than in the first."""
    for pattern in (pattern for pattern, targets in here.items() if targets != first.get(pattern, targets)):
        mode = "training" if training else "evaluation"
        inside = next((module for module, _, _ in sorted(first[pattern]) if module), "")
        instead = f"a rule for the module ({inside + '*'!r})" if inside else "rules for modules"
        warn_user(
            f"{model}: rule {pattern!r} matches {_words(here[pattern])} in this graph ({mode} mode), and "
            f"{_words(first[pattern])} in the first. Node names belong to one graph: write {instead}, or "
            "convert the model in this mode with rules for its names."
        )


def warn_of_unmatched(graph_module: fx.GraphModule, policy: Policy) -> None:
    """Warns of rules that match nothing in a graph, where the other graphs of its model are not known."""
    if not policy.rules:
        return
    ops, _ = names_of(graph_module.graph)
    around = {path for node in graph_module.graph.nodes for path in module_paths_of(node)}
    for pattern in RuleBook(policy.rules, around).unmatched(ops):
        near = did_you_mean(pattern, [*around, *(NODE_PREFIX + name for name in ops)])
        warn_user(
            f"ampgraph backend: rule {pattern!r} ({policy.rules[pattern]}) matches no module and no node of "
            f"this graph. It has an effect only if another graph of the model has it.{near}"
        )


def warn_of_idle(
    model: str,
    graphs: Iterable[tuple[fx.GraphModule, Plan]],
    policy: Policy,
    modules: Iterable[ModulePaths],
) -> None:
    """Warns of rules of which no node takes the dtype: facts and guards decide before rules do."""
    if not policy.rules:
        return
    if policy.level == "O0":
        _warn_of_level_0(model, policy)
        return
    book = RuleBook(policy.rules, modules)
    matched: dict[str, list[tuple[fx.Node, Decision]]] = {}
    for graph_module, plan in graphs:
        for node in graph_module.graph.nodes:
            decision = plan.decisions.get(node.name) if node.op == "call_function" else None
            if decision and (match := book.match(node.name, module_paths_of(node))):
                matched.setdefault(match.pattern, []).append((node, decision))
    of_nodes = book.named(())
    for pattern, found in matched.items():
        asked = policy.low_dtype if policy.rules[pattern] == "low" else torch.float32
        if _is_idle(found, asked, pattern in of_nodes):
            warn_user(f"{model}: rule {pattern!r} ({policy.rules[pattern]}) decides nothing: {_why(found)}")


def _is_idle(found: list[tuple[fx.Node, Decision]], asked: torch.dtype, is_of_nodes: bool) -> bool:
    """Whether no node takes the dtype that a rule asks for.

    A rule for a module also holds in branches and loops. The dtype of what these return says nothing of it.
    """
    others = [decision for node, decision in found if not _is_of_bodies(node)]
    if len(others) < len(found) and not is_of_nodes:
        return False
    return all(decision.by != "rule" and decision.dtype is not asked for decision in others)


def _warn_of_level_0(model: str, policy: Policy) -> None:
    low = [pattern for pattern, value in policy.rules.items() if value == "low"]
    if low:
        what = f"rule {low[0]!r} (low) decides" if len(low) == 1 else f"{len(low)} rules with 'low' decide"
        warn_user(f"{model}: {what} nothing: level O0 changes nothing. Rules need level O1, O2 or O3.")


def _why(found: list[tuple[fx.Node, Decision]]) -> str:
    node, decision = next((pair for pair in found if pair[1].dtype is not None), found[0])
    dtype = str(decision.dtype).removeprefix("torch.") if decision.dtype else "of a dtype that stays"
    if _is_of_bodies(node):
        instead = " It runs branches or a loop, whose ops have their own dtypes: name their modules."
    else:
        instead = f" It is an element of {node.args[0]!s}: name that op." if is_item(node) else ""
    return f"{node.name} is {dtype} ({decision.by}: {decision.reason}).{instead}"


def _is_of_bodies(node: fx.Node) -> bool:
    """Whether a node runs branches or a loop, or is an element of what they return."""
    return runs_bodies(maker_of_item(node))


def _words(targets: Counter[tuple[str, str, str]]) -> str:
    words = [f"{op} of {module or 'the model'} ({line})" for module, op, line in sorted(targets)]
    return ", ".join(words[:3]) + (" .." if len(words) > 3 else "") if words else "no op"
