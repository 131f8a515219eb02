"""`EagerProgram`: a graph as a straight Python function, for the backend ``"eager"``.

A graph module looks up every op and every parameter by name at each call. An `EagerProgram` binds ops once.
It looks up a parameter in the dict of its module, so it sees a replaced parameter.
"""

from __future__ import annotations

import itertools
import linecache
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from types import FunctionType
from typing import Any, NamedTuple

from torch import fx, nn
from torch.utils import _pytree as pytree

from .._compat import flat_inputs, has_code, pytree_info
from ..ops.bindings import call_of
from ..passes.analysis.facts import is_cast
from ..training.gradient_boundary import EAGERLY

_numbers = itertools.count()
_LITERALS = (int, float, bool, str, type(None))


class EagerProgram:
    """Runs the code of a graph, or ``otherwise`` if the graph's own code has changed since.

    Args:
        code: The code.
        root: The module whose parameters it reads; it has the structure of the graph's.
        otherwise: What runs if the code cannot.
        instead: Functions to call in the place of others.
    """

    def __init__(
        self,
        code: EagerCode,
        root: nn.Module,
        otherwise: Callable[..., Any],
        instead: Mapping[Callable, Callable] | None = None,
    ) -> None:
        self._code, self._otherwise = code, otherwise  # the code keeps the source text for errors
        self._class, self._forward = code.cls, code.forward
        self._function, self._parameters = code.bound_to(root, instead or {})
        info = pytree_info(code.graph_module.graph)
        assert info is not None  # else `is_writable` is false
        assert info.out_spec is not None
        self._out_spec = info.out_spec
        self._flat = _number_of_flat_arguments(info.in_spec)
        self._is_single = info.out_spec.is_leaf()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph on arguments of the structure that it was captured with."""
        if not has_code(self._class, self._forward):
            return self._otherwise(*args, **kwargs)
        leaves: Sequence[Any] = args
        if kwargs or len(args) != self._flat:
            leaves = flat_inputs(self._code.graph_module, args, kwargs)
        try:
            outputs = self._function(*leaves)
        except KeyError:
            if all(name in held for held, name in self._parameters):
                raise
            return self._otherwise(*args, **kwargs)  # a parameter became another kind of attribute
        return outputs[0] if self._is_single else pytree.tree_unflatten(outputs, self._out_spec)


def eager_program(graph_module: fx.GraphModule) -> EagerProgram:
    """Returns a program over the graph module's own parameters; their inputs and outputs are pytrees."""
    return EagerProgram(EagerCode(graph_module), graph_module, graph_module)


def flat_program(graph_module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    """Returns a function that takes and returns the graph's own inputs and outputs, which are tensors."""
    code = EagerCode(graph_module)
    function, _ = code.bound_to(graph_module, {})

    def run(*inputs: Any) -> Sequence[Any]:  # holds the code, whose lines show in tracebacks
        outputs: Sequence[Any] = (function if has_code(code.cls, code.forward) else graph_module)(*inputs)
        return outputs

    return run


def _dicts(owner: Any) -> tuple[dict[str, Any], ...]:
    """Returns the dicts of a module that may hold a parameter; of another object none."""
    return (owner._parameters, owner._buffers, vars(owner)) if isinstance(owner, nn.Module) else ()


def is_writable(graph_module: fx.GraphModule) -> bool:
    """Whether the graph contains only calls of functions, and its arguments are pytrees."""
    graph = graph_module.graph
    has_other_calls = any(node.op in ("call_module", "call_method") for node in graph.nodes)
    return pytree_info(graph) is not None and not has_other_calls


def _number_of_flat_arguments(spec: pytree.TreeSpec) -> int:
    """Returns the number of arguments if all are positional and each is one leaf; else -1."""
    positional, keywords = spec.children()
    if keywords.num_leaves or not all(child.is_leaf() for child in positional.children()):
        return -1
    return positional.num_children


class _Place(NamedTuple):
    """Where code looks a parameter up.

    Attributes:
        owner: The path of the module (or object) that has it.
        kind: Position among the module's dicts; None is an attribute.
        name: Its name there.
    """

    owner: str
    kind: int | None
    name: str

    def holder(self, root: nn.Module) -> Any:
        """Returns the dict, or the object, that holds it."""
        owner: Any = root
        for part in self.owner.split(".") if self.owner else ():
            owner = getattr(owner, part)
        return owner if self.kind is None else _dicts(owner)[self.kind]


class EagerCode:
    """One graph as source code, compiled once for all modules with the parameters of such names.

    Args:
        graph_module: The graph over live parameters.

    Attributes:
        cls: Its class.
        forward: The code that it had.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.cls, self.forward = type(graph_module), type(graph_module).forward
        # A cast of the model's own is left without readers where they take the tensor before it.
        self.nodes = [node for node in graph_module.graph.nodes if node.users or not is_cast(node)]
        self.names = {node: f"v{i}" for i, node in enumerate(self.nodes)}
        self.bound: dict[str, Any] = {}
        self.ids: dict[int, str] = {}
        self.places: dict[_Place, str] = {}
        self._function = self._compiled()

    def bound_to(
        self, root: nn.Module, instead: Mapping[Callable, Callable]
    ) -> tuple[Callable, list[tuple[dict[str, Any], str]]]:
        """Returns the function over the parameters of a module, and the dicts and keys that it looks up."""
        bound, lookups = dict(self.bound), []
        for function, other in instead.items():
            if id(function) in self.ids:
                bound[self.ids[id(function)]] = other
        for place, name in self.places.items():
            bound[name] = place.holder(root)
            if place.kind is not None:
                lookups.append((bound[name], place.name))
        return FunctionType(self._function.__code__, bound), lookups

    def _compiled(self) -> Callable:
        source = self._source()
        name = f"<ampgraph eager graph {next(_numbers)}>"
        exec(compile(source, name, "exec"), self.bound)
        function: Callable = self.bound.pop("run")
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        weakref.finalize(self, linecache.cache.pop, name, None)
        return function

    def _source(self) -> str:
        last = {used: node for node in self.nodes for used in node.all_input_nodes}
        placeholders = [self.names[n] for n in self.nodes if n.op == "placeholder"]
        lines = [f"def run({', '.join(placeholders)}):"]
        attributes = {n for n in self.nodes if n.op == "get_attr" and n.users}
        # First, so that a missing parameter raises an error before any write.
        lines += [f"    {self.names[n]} = {self._attribute(n.target)}" for n in self.nodes if n in attributes]
        for node in self.nodes:
            if node.op == "output":
                lines.append(f"    return {self._text(tuple(node.args[0]))}")
            elif node.op == "call_function":
                freed = [self.names[n] for n in node.all_input_nodes if last[n] is node]
                unused = [] if node in last else [self.names[node]]
                after = "".join(f"{name} = " for name in (*freed, *unused))
                lines.append(
                    f"    {self.names[node]} = {self._call(node)}" + (f"; {after}None" if after else "")
                )
        return "\n".join(lines) + "\n"

    def _attribute(self, target: str) -> str:
        path, _, name = target.rpartition(".")
        place = _Place(path, None, name)
        owner = place.holder(self.graph_module)
        for kind, held in enumerate(_dicts(owner)):
            if name in held:
                return f"{self._bind_place(place._replace(kind=kind), held)}[{name!r}]"
        bound = self._bind_place(place, owner)
        return f"{bound}.{name}" if name.isidentifier() else f"getattr({bound}, {name!r})"

    def _bind_place(self, place: _Place, holder: Any) -> str:
        self.places[place] = self._bind(holder)
        return self.places[place]

    def _call(self, node: fx.Node) -> str:
        if node.target is getitem and isinstance(node.args[1], int):
            return f"{self._text(node.args[0])}[{node.args[1]}]"
        function, args = call_of(node.target, node.args, node.kwargs)
        arguments = [self._text(a) for a in args]
        arguments += [f"{name}={self._text(a)}" for name, a in node.kwargs.items()]
        return f"{self._bind(EAGERLY.get(function, function))}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            inner = ", ".join(map(self._text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if inner else "()"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._text, (value.start, value.stop, value.step)))})"
        if type(value) in _LITERALS and not (isinstance(value, float) and not math.isfinite(value)):
            return repr(value)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._text(v)}" for k, v in value.items()) + "}"
        return self._bind(value)

    def _bind(self, value: Any) -> str:
        """Returns a name for an object that has no source text."""
        if id(value) not in self.ids:
            self.ids[id(value)] = f"g{len(self.ids)}"
            self.bound[self.ids[id(value)]] = value
        return self.ids[id(value)]
