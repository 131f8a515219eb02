"""Small builders that several test files share."""

from __future__ import annotations

import functools
import operator
import random
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ampgraph import Policy
from ampgraph._compat import FakeTensorMode, OpOverload, evaluate
from ampgraph.guards import guard_of
from ampgraph.marks import InputMark, set_input_mark
from ampgraph.passes import (
    ClassifyOps,
    Normalize,
    PropagatePrecision,
    is_inserted_cast,
    run_passes,
    workspace,
)
from ampgraph.passes.analysis.facts import tensors
from ampgraph.passes.analysis.problem import Problem
from ampgraph.passes.place import Placement, _weigher, place_optimally
from ampgraph.runtime.graph_copies import copy_graph

aten = torch.ops.aten
LOW = torch.bfloat16


class GraphBuilder:
    """Builds an ATen graph node by node, with the metadata that a capture would leave."""

    def __init__(self, device: str = "cpu") -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()
        self.device = device
        self.inputs: list[Node] = []

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        return self._placeholder("x", shape, dtype)

    def weight(self, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        node = self._placeholder("w", shape, dtype)
        set_input_mark(node, InputMark(is_parameter=True))
        return node

    def _placeholder(self, letter: str, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
        with self.graph.inserting_before(
            next(iter(n for n in self.graph.nodes if n.op != "placeholder"), None)
        ):
            node = self.graph.placeholder(f"{letter}{len(self.inputs)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=self.device)
        self.inputs.append(node)
        return node

    def call(self, target: Callable, *args: object, **kwargs: object) -> Node:
        """Adds one call; raises what the op raises, with the graph as it was before."""
        node = self.graph.call_function(target, args, kwargs)
        try:
            node.meta["val"] = evaluate(node, self.mode)
        except Exception:
            self.graph.erase_node(node)
            raise
        return node

    def finish(self, *outputs: Node) -> GraphModule:
        self.graph.output(tuple(outputs))
        return GraphModule(nn.Module(), self.graph)


def sample_inputs(graph_module: GraphModule) -> list[torch.Tensor]:
    """Returns random real tensors for the placeholders of a graph."""
    fakes = [n.meta["val"] for n in graph_module.graph.find_nodes(op="placeholder")]
    return [
        torch.randn(f.shape).to(f.dtype) if f.dtype.is_floating_point else torch.zeros(f.shape, dtype=f.dtype)
        for f in fakes
    ]


def problem_of(graph_module: GraphModule, policy: Policy, low_dtype: torch.dtype = LOW) -> Problem:
    """Runs the analysis up to the free variables."""
    policy = policy.replace(dtype=low_dtype)
    steps = [
        Normalize(),
        ClassifyOps(policy),
        PropagatePrecision(policy, check_rules=False),
    ]
    run_passes(graph_module, steps)
    problem = workspace(graph_module).problem
    assert problem is not None
    return problem


def free_variables(problem: Problem) -> list[Node]:
    return [n for n, v in problem.variables.items() if v.pinned is None]


def optimal(problem: Problem, objective: str) -> Placement:
    """The least placement under one objective; "priced" is traffic with three more bytes a cast byte."""
    if objective == "traffic":
        return place_optimally(problem, lambda cost: cost.traffic)
    if objective == "priced":
        return place_optimally(problem, lambda cost: cost.traffic + 3 * cost.activation_cast_bytes)
    return place_optimally(problem, _weigher(problem, objective))


# -- random graphs --------------------------------------------------------------------------------------


class RandomGraph:
    """A random ATen graph over 2-d tensors that mixes every kind of op which placement tells apart."""

    SIZES = (1, 2, 3, 8)

    def __init__(self, seed: int, steps: int = 9) -> None:
        self.rng = random.Random(seed)
        self.build = GraphBuilder()
        self.values: list[Node] = []
        self.masks: list[Node] = []
        self.weights: list[Node] = []
        for _ in range(self.rng.randint(1, 3)):
            dtype = LOW if self.rng.random() < 0.25 else torch.float32
            self.values.append(self.build.input(self._size(), self._size(), dtype=dtype))
        made = 0
        while made < steps:
            made += self._step()
        ends = [v for v in self.values if not v.users and v.op != "placeholder"]
        ends = ends or self.values[-1:]
        extra = [v for v in self.values if self.rng.random() < 0.1]
        outputs = list(dict.fromkeys([*ends, *extra, *self.masks[:1]]))
        self.rng.shuffle(outputs)
        self.graph_module = self.build.finish(*outputs)

    def _size(self) -> int:
        return self.rng.choice(self.SIZES)

    def _pick(self) -> Node:
        return self.rng.choice(self.values[-4:] if self.rng.random() < 0.7 else self.values)

    def _like(self, node: Node) -> Node:
        """Another value of the same shape if there is one."""
        shape = node.meta["val"].shape
        return self.rng.choice([v for v in self.values if v.meta["val"].shape == shape])

    def _step(self) -> bool:
        choose = self.rng.choice(self.STEPS)
        try:
            made = choose(self, self._pick())
        except (RuntimeError, ValueError, IndexError):
            return False
        self.values += [made] if isinstance(made, Node) else made
        return bool(made)

    def _white(self, x: Node) -> Node:
        value = x.meta["val"]
        weights = [w for w in self.weights if w.meta["val"].shape[-1] == value.shape[-1]]
        if weights and self.rng.random() < 0.4:
            weight = self.rng.choice(weights)
        else:
            weight = self.build.weight(self._size(), value.shape[-1], dtype=value.dtype)
            self.weights.append(weight)
        return self.build.call(aten.linear.default, x, weight)

    def _matmul(self, x: Node) -> Node:
        return self.build.call(aten.matmul.default, x, self.build.call(aten.t.default, self._like(x)))

    def _unary(self, x: Node) -> Node:
        op = self.rng.choice(
            [
                aten.relu,
                aten.neg,
                aten.gelu,
                aten.sigmoid,
                aten.exp,
                aten.rsqrt,
                aten.clone,
                aten.abs,
                aten.cos,
            ]
        )
        return self.build.call(op.default, x)

    def _promoting(self, x: Node) -> Node:
        op = self.rng.choice([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.maximum.default])
        operands = [x, self._like(x)]
        self.rng.shuffle(operands)
        return self.build.call(op, *operands)

    def _cat(self, x: Node) -> Node:
        parts = [x, self._like(x)] if self.rng.random() < 0.7 else [x, self._like(x), self._like(x)]
        if self.rng.random() < 0.3:
            return self.build.call(aten.flatten.using_ints, self.build.call(aten.stack.default, parts), 0, 1)
        return self.build.call(aten.cat.default, parts, self.rng.choice([0, 1]))

    def _scaled(self, x: Node) -> Node:
        return self.build.call(aten.mul.Tensor, x, self.rng.choice([0.5, 2.0, 1e-12]))

    def _dtype_argument(self, x: Node) -> Node:
        if self.rng.random() < 0.6:
            return self.build.call(aten.softmax.int, x, -1)
        return self.build.call(aten.sum.dim_IntList, x, [self.rng.choice([0, 1])], True)

    def _mean(self, x: Node) -> Node:
        return self.build.call(aten.mean.dim, x, [-1], True)

    def _norm(self, x: Node) -> Node:
        size = x.meta["val"].shape[-1]
        weight = self.build.weight(size, dtype=x.meta["val"].dtype)
        return self.build.call(aten.layer_norm.default, x, [size], weight)

    def _where(self, x: Node) -> list[Node]:
        mask = self.build.call(aten.gt.Scalar, self._like(x), 0)
        self.masks.append(mask)
        return [self.build.call(aten.where.self, mask, x, self._like(x))]

    def _view(self, x: Node) -> Node:
        kind = self.rng.randrange(3)
        if kind == 0:
            return self.build.call(aten.t.default, x)
        if kind == 1:
            return self.build.call(aten.slice.Tensor, x, self.rng.choice([0, 1]), 0, 1)
        rows, columns = x.meta["val"].shape
        return self.build.call(aten.expand.default, x, [self._size() if rows == 1 else rows, columns])

    def _several(self, x: Node) -> list[Node]:
        dim = self.rng.choice([0, 1])
        parts = self.build.call(aten.chunk.default, x, 2, dim)
        count = len(parts.meta["val"])
        return [self.build.call(operator.getitem, parts, i) for i in range(count)]

    def _largest(self, x: Node) -> Node:
        return self.build.call(operator.getitem, self.build.call(aten.max.dim, x, 1, True), 0)

    def _user_cast(self, x: Node) -> Node:
        return self.build.call(aten.to.dtype, x, self.rng.choice([torch.float32, LOW]))

    def _zero_dim(self, x: Node) -> Node:
        return self.build.call(aten.mul.Tensor, x, self.build.call(aten.mean.default, self._pick()))

    def _written(self, x: Node) -> Node:
        made = self.build.call(aten.clone.default, x)
        part = self.build.call(aten.slice.Tensor, made, 0, 0, 1)
        self.build.call(aten.copy_.default, part, self.build.call(aten.slice.Tensor, self._like(x), 0, 0, 1))
        return made

    STEPS = (
        *(_white, _white, _white, _matmul, _unary, _unary, _unary, _promoting, _promoting, _cat, _scaled),
        *(_dtype_argument, _mean, _norm, _where, _view, _view, _several, _largest, _user_cast, _zero_dim),
        _written,
    )


@functools.cache
def _random_graph(kind: type[RandomGraph], seed: int, steps: int) -> Graph:
    return kind(seed, steps).graph_module.graph


def random_graph(seed: int, steps: int, kind: type[RandomGraph] = RandomGraph) -> GraphModule:
    """The graph of `RandomGraph`, which several tests start from; it is built once."""
    return GraphModule(nn.Module(), copy_graph(_random_graph(kind, seed, steps)))


# -- reading results ------------------------------------------------------------------------------------


def inserted(graph_module: GraphModule) -> list[Node]:
    """Returns the casts that ampgraph inserted."""
    return [n for n in graph_module.graph.nodes if is_inserted_cast(n)]


def inserted_to(graph_module: GraphModule, dtype: torch.dtype) -> list[Node]:
    return [n for n in inserted(graph_module) if n.args[1] == dtype]


def nodes_of(graph_module: GraphModule, target: str) -> list[Node]:
    """Returns the nodes of an op by packet name (``"linear"``)."""
    return [
        n
        for n in graph_module.graph.nodes
        if n.op == "call_function" and str(n.target).split(".")[1:2] == [target]
    ]


def dtype_of(graph_module: GraphModule, target: str) -> list[torch.dtype]:
    """Returns the result dtypes of all nodes of an op."""
    return [n.meta["val"].dtype for n in nodes_of(graph_module, target)]


def graph_lines(graph_module: GraphModule) -> list[str]:
    """One line a node, for comparing graphs node for node."""
    return [n.format_node() or str(n.args) for n in graph_module.graph.nodes]


def op_chain(graph_module: GraphModule) -> str:
    """Returns a graph as people read it: ``linear = linear(x0, w1) bf16`` for each node, in order."""
    return "\n".join(_chain_line(node) for node in graph_module.graph.nodes)


def _chain_line(node: Node) -> str:
    if node.op == "output":
        return f"return {_shown(node.args[0])}"
    types = " ".join(type_name(t.dtype) for t in tensors(node))
    guard = f"  guard={guard_of(node)}" if guard_of(node) else ""
    if node.op != "call_function":
        return f"{node.name} {types}".rstrip() + guard
    op = str(node.target) if isinstance(node.target, OpOverload) else node.target.__name__
    named = [f"{key}={_shown(value)}" for key, value in node.kwargs.items()]
    arguments = ", ".join([*map(_shown, node.args), *named])
    op = op.removeprefix("aten.").removesuffix(".default")
    return f"{node.name} = {op}({arguments}) {types}".rstrip() + guard


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return type_name(value) if isinstance(value, torch.dtype) else str(value)


def type_name(dtype: torch.dtype) -> str:
    """Returns ``f32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")


def modules(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


class Fn(nn.Module):
    """Wraps a function of tensors as a model."""

    def __init__(self, function: Callable, **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args)


def warnings_of_ours(told: Iterable[warnings.WarningMessage]) -> list[str]:
    """Returns the texts of user warnings. On Python 3.13.0 Dynamo adds a runtime warning."""
    return [str(warning.message) for warning in told if warning.category is UserWarning]


def close(actual: torch.Tensor, expected: torch.Tensor, rel: float = 0.03) -> None:
    """Checks a low-precision result against float32 by relative norm."""
    assert torch.isfinite(actual).all()
    error = (actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6)
    assert error <= rel, f"relative error {error:.3g} > {rel}"
