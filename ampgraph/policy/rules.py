"""Finds the rule of a policy that applies to a node, by module path or by node name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from ampgraph.errors import PolicyError, did_you_mean

NODE_PREFIX = "node:"
# The path of a module; of a module with several, all of them.
ModulePaths = str | tuple[str, ...]


class Match(NamedTuple):
    """The rule that applies to a node, and the name that it matches."""

    pattern: str
    value: str
    name: str


class RuleBook:
    """The rules of a policy, for one model.

    ``"node:linear*"`` is a glob over node names. A glob without the prefix matches module paths if it matches
    any module of the model. Otherwise it matches node names. It never matches both.
    """

    def __init__(self, rules: Mapping[str, str], modules: Iterable[ModulePaths]) -> None:
        """Args:
        rules: The rules of the policy, by pattern.
        modules: The model's module paths; of a module with several, all of them. The root is always included.
        """
        groups = [(paths,) if isinstance(paths, str) else paths for paths in modules]
        self._same = {path: group for group in groups for path in group}
        self.modules = {"", *self._same}
        self._of_nodes: dict[str, str] = {}  # glob over names -> pattern as the user wrote it
        self._of_modules: list[str] = []
        self._rules = rules
        for pattern in rules:
            if pattern.startswith(NODE_PREFIX):
                self._of_nodes[pattern] = pattern.removeprefix(NODE_PREFIX)
            elif any(fnmatchcase(path, pattern) for path in self.modules):
                self._of_modules.append(pattern)
            else:
                self._of_nodes[pattern] = pattern

    def check(self, ops: Iterable[str], others: Iterable[str] = ()) -> None:
        """Raises `PolicyError` for a rule that matches no module and no op.

        Args:
            ops: The names of the ops of a graph.
            others: The names of its inputs, parameters, buffers and outputs, for the error.
        """
        names = list(ops) if self._of_nodes else []
        for pattern in self.unmatched(names):
            glob = self._of_nodes[pattern]
            if same := next((name for name in others if fnmatchcase(name, glob)), None):
                raise PolicyError(
                    f"rule {pattern!r} matches {same!r}, which is an input, a parameter, a buffer or the "
                    "output of the graph: rules decide the dtypes of ops. Name an op that reads or makes it, "
                    "or a module."
                )
            if pattern.startswith(NODE_PREFIX):
                near = did_you_mean(pattern, [NODE_PREFIX + name for name in names])
                raise PolicyError(f"rule {pattern!r} matches no node of the model.{near}")
            near = did_you_mean(pattern.rstrip(".*"), [*self.modules, *names])
            raise PolicyError(f"rule {pattern!r} matches no module and no node of the model.{near}")

    def named(self, nodes: Iterable[str]) -> dict[str, list[str]]:
        """Returns the nodes that each rule for node names matches."""
        names = list(nodes)
        globs = self._of_nodes.items()
        return {pattern: [n for n in names if fnmatchcase(n, glob)] for pattern, glob in globs}

    def unmatched(self, nodes: Iterable[str]) -> list[str]:
        """Returns the patterns that match no module and none of the nodes."""
        return [pattern for pattern, names in self.named(nodes).items() if not names]

    def match(self, node: str, modules: Iterable[str]) -> Match | None:
        """Returns the rule that applies to a node: a rule for its name, else for the innermost module.

        Args:
            node: The node's name.
            modules: Paths of the modules around it, innermost first.

        Raises:
            PolicyError: Two rules for one name contradict each other.
        """
        if not self._rules:
            return None
        found = [pattern for pattern, glob in self._of_nodes.items() if fnmatchcase(node, glob)]
        if found:
            return self._one(found, node, node)
        for path in _outwards(modules) if self._of_modules else ():
            same = self._same.get(path, (path,))
            if found := [p for p in self._of_modules if any(fnmatchcase(name, p) for name in same)]:
                return self._one(found, path, node)
        return None

    def _one(self, patterns: list[str], name: str, node: str) -> Match:
        matches = {pattern: self._rules[pattern] for pattern in patterns}
        if len(set(matches.values())) > 1:
            raise PolicyError(f"contradictory rules for {name!r} (node {node!r}): {matches}")
        return Match(patterns[0], matches[patterns[0]], name)


def _outwards(modules: Iterable[str]) -> Iterator[str]:
    """Yields the paths of the modules around a call, with those that hold a module but are not called.

    A ``ModuleList`` is not called, nor is a module of which forward calls another method.
    """
    called = [*modules, ""]
    seen: set[str] = set()
    for path in called:
        while path not in seen:
            seen.add(path)
            yield path
            path = path.rpartition(".")[0]
            if path in called:
                break
