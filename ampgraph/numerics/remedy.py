"""Searches for rules that keep a model finite. Each set of rules is planned and run.

Float32 for the named node alone is not enough, because the next low reader overflows at its cast. A remedy
keeps all low producers and readers of a tensor out of range in float32. If values are still not finite, the
remedy grows from them. No rule can name a node that only a body has (a branch of ``torch.cond``, a loop):
if no names help, rules for the modules in bodies are tried. Rules that are not needed are removed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from ..origin import module_path
from ..plan import Plan
from ..policy.policy import Policy
from ..policy.rules import NODE_PREFIX, ModulePaths, RuleBook
from ..report.graph_view import with_bodies
from ..runtime.run_graph import Draws
from .neighbours import Neighbours, is_changeable
from .observe import Observer, Place, Seen
from .run_model import ModelRunner, Part

# Rounds of growth before everything is kept in float32, and runs that remove rules.
ROUNDS, RUNS = 5, 48


@dataclass
class Trial:
    """One run under one policy.

    Attributes:
        seen: What it has shown.
        plans: The plan of each graph.
        bad: The values less finite than in float32, in the order of the run, then the gradients.
    """

    seen: Seen
    plans: dict[int, Plan]
    bad: list[Place]


@dataclass
class Trials:
    """Runs a model under its policy and more rules.

    Attributes:
        model: Runs the model.
        reference: What the float32 run has shown.
        loss: Makes the loss; None: the forward alone.
        scale: The loss scale; None: none.
        draws: Random numbers that all runs share.
        held: Modules that runs keep in float32.
    """

    model: ModelRunner
    reference: Seen
    loss: Callable[[Any], Tensor] | None
    scale: float | None
    draws: Draws
    held: tuple[str, ...] = ()
    _neighbours: dict[int, Neighbours] = field(default_factory=dict)

    def neighbours(self, part: int) -> Neighbours:
        """Returns who makes and reads what in one graph."""
        return self._neighbours.setdefault(part, Neighbours(self.model.parts[part]))

    def own(self, place: Place, seen: Seen) -> Place:
        """Returns the place in the graph without casts."""
        node = self.neighbours(place[0]).own(seen.nodes.get(place))
        return (place[0], node.name) if node is not None else place

    def run(self, pins: Iterable[str] = ()) -> Trial:
        """Runs with these nodes in float32."""
        plans: dict[int, Plan] = {}
        graphs: dict[int, GraphModule] = {}
        pins = frozenset(pins)

        def graph_of(part: Part) -> GraphModule:
            if part.index not in graphs:
                graphs[part.index], plans[part.index] = self._planned(part, pins)
            return graphs[part.index]

        seen = Observer(self.model, graph_of, self.loss, self.scale, self.draws).run()
        return Trial(seen, plans, self._bad(seen))

    def _planned(self, part: Part, pins: frozenset[str]) -> tuple[GraphModule, Plan]:
        if not pins and not self.held:
            return part.graph_module, part.plan
        return part.under(self.model.amp.policy.replace(rules=self.rules(pins)))

    def _bad(self, seen: Seen) -> list[Place]:
        reference = self.reference
        found = [
            p for p, v in seen.values.items() if v.is_worse_than(reference.values.get(self.own(p, seen)))
        ]
        for place, gradient in seen.gradients.items():
            if gradient.is_worse_than(reference.gradients.get(self.own(place, seen))):
                found.append(place)
        found += [p for p, v in seen.leaves.items() if v.is_worse_than(reference.leaves.get(p))]
        pairs = zip(seen.outputs, reference.outputs, strict=True)
        if not found and any(ours.is_worse_than(theirs) for ours, theirs in pairs):
            found += self._outputs(seen)  # the loss: an output was rounded to what it cannot stand
        return found

    def _outputs(self, seen: Seen) -> list[Place]:
        part = self.model.parts[-1]
        nodes = part.float32.graph.output_node().all_input_nodes
        return [(part.index, node.name) for node in nodes if (part.index, node.name) in seen.values]

    def rules(self, pins: Iterable[str]) -> dict[str, str]:
        """Returns the policy's rules, these and those for modules.

        A glob that would contradict the names gives way, name by name.
        """
        pins = sorted(pins)
        names = {name for part in self.model.parts for name in self.neighbours(part.index).nodes}
        rules = merged(self.model.amp.policy, pins, names, self.model.modules)
        return {**rules, **dict.fromkeys(self.held, "fp32")}

    # -- search ----------------------------------------------------------------------------------

    def search(
        self, first: Trial, wide: Iterable[Place], needed: frozenset[str] = frozenset()
    ) -> frozenset[str] | None:
        """Returns nodes that, in float32, leave nothing bad, alone or with the modules `held`; None: none do.

        Args:
            first: The bad values without rules.
            wide: The tensors that do not fit, by what float32 shows.
            needed: Nodes that other batches need.
        """
        wide = list(wide)
        pins = self._searched(first, wide, needed)
        if pins is not None or not (modules := self._modules_in_bodies()):
            return pins
        self.held = modules
        pins = self._searched(self.run(needed), wide, needed)
        self.held = () if pins is None else self._fewer_modules(modules, pins)
        return pins

    def _searched(self, first: Trial, wide: Iterable[Place], needed: frozenset[str]) -> frozenset[str] | None:
        pins = set(needed)
        for index, name in wide:
            node = self.neighbours(index).nodes[name]
            pins |= self.neighbours(index).around([node], first.plans[index])
        trial = self.run(pins) if pins else first
        for _ in range(ROUNDS):
            if not trial.bad:
                break
            more = self._grown(trial) - pins
            if not more:
                break
            pins |= more
            trial = self.run(pins)
        if trial.bad:
            pins = self._everything(first)
            if not pins or self.run(pins).bad:
                return None
        return needed | frozenset(self._reduced(sorted(pins - needed), needed))

    def _grown(self, trial: Trial) -> set[str]:
        found: set[str] = set()
        for place in origins(trial):
            near, plan = self.neighbours(place[0]), trial.plans[place[0]]
            node = near.own(trial.seen.nodes[place])
            if node is None:
                continue
            more = near.around([node], plan)
            if not more:
                more = near.nearest(node, plan, upwards=True)
                more |= near.nearest(node, plan, upwards=False) if self.loss else set()
            found |= more
        return found

    def _everything(self, first: Trial) -> set[str]:
        return {
            node.name
            for index, plan in first.plans.items()
            for node in self.neighbours(index).nodes.values()
            if is_changeable(node, plan)
        }

    def _reduced(self, pins: list[str], needed: frozenset[str]) -> list[str]:
        """Takes away blocks, then single nodes, as long as nothing gets bad and runs are left."""
        runs, size = RUNS, max(1, len(pins) // 2)
        while runs > 0:
            for start in range(0, len(pins), size)[::-1]:
                rest = pins[:start] + pins[start + size :]
                if runs > 0 and (rest or needed or self.held) and not self.run([*rest, *needed]).bad:
                    pins = rest
                runs -= 1
            if size == 1:
                break
            size //= 2
        return pins

    def _modules_in_bodies(self) -> tuple[str, ...]:
        """Returns the innermost modules of ops that run low in bodies, except those that rules want low."""
        found = {
            module_path(node)
            for part in self.model.parts
            for body in with_bodies(part.graph_module, part.plan)
            for node in body.module.graph.nodes
            if body.prefix and is_changeable(node, body.plan)
        }
        low = [pattern for pattern, value in self.model.amp.policy.rules.items() if value == "low"]
        wanted = {path for path in found if any(fnmatchcase(path, pattern) for pattern in low)}
        return tuple(sorted(found - wanted - {""}))

    def _fewer_modules(self, modules: tuple[str, ...], pins: frozenset[str]) -> tuple[str, ...]:
        """Takes away modules one by one, as long as nothing gets bad and runs are left."""
        kept = modules
        for module in modules[:RUNS]:
            self.held = tuple(path for path in kept if path != module)
            if self.held and not self.run(pins).bad:
                kept = self.held
        return kept


def origins(trial: Trial) -> list[Place]:
    """Returns the bad places that read (or, of gradients, receive) nothing bad."""
    bad = set(trial.bad)
    values = [p for p in trial.bad if p in trial.seen.values and _is_origin(p, trial, bad)]
    return values or trial.bad[:1]


def _is_origin(place: Place, trial: Trial, bad: set[Place]) -> bool:
    return not any((place[0], n.name) in bad for n in trial.seen.nodes[place].all_input_nodes)


def merged(
    policy: Policy, pins: Iterable[str], names: Iterable[str], modules: Iterable[ModulePaths]
) -> dict[str, str]:
    """Returns the policy's rules and ``"fp32"`` for the pinned nodes.

    Where a glob over node names asks for low and matches a pinned node, the names that it matches take its
    place. Rules by module need not give way: a rule by name stands above them.
    """
    pins, paths, rules = list(pins), RuleBook({}, modules).modules, dict(policy.rules)
    for pattern, value in policy.rules.items():
        glob = pattern.removeprefix(NODE_PREFIX)
        if glob == pattern and any(fnmatchcase(path, pattern) for path in paths):
            continue
        if value == "low" and any(fnmatchcase(pin, glob) for pin in pins):
            del rules[pattern]
            rules.update({NODE_PREFIX + name: value for name in sorted(names) if fnmatchcase(name, glob)})
    return {**rules, **{NODE_PREFIX + name: "fp32" for name in pins}}


def readers_of(node: Node, own: Callable[[Node], bool]) -> list[Node]:
    """Returns the nodes of the source model that read a tensor, directly or through casts."""
    found: list[Node] = []
    waiting = list(node.users)
    while waiting:
        user = waiting.pop(0)
        if user.op == "output":
            continue
        if own(user):
            found.append(user)
        else:
            waiting += user.users
    return found
