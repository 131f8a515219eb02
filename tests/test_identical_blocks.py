"""Blocks of one model that are alike use one capture; blocks that differ in anything do not."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import ampgraph
import ampgraph.runtime.export_call as export_call
from ampgraph import DynamicLossScale, Policy
from ampgraph.runtime.places import Places

from .helpers import close

FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))
WIDTH = 8
TABLE: dict[object, float] = {}
# A capture sees neither the block itself nor what is set on a parameter object.
NOT_SEEN = ("itself", "parameter")
SETTINGS = types.SimpleNamespace(gain=1.0)


class Config:
    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain


def _one() -> float:
    return 1.0


class Block(nn.Module):
    """Reads one kind of state in each of many ways; ``ways`` switches them on."""

    def __init__(self, ways: str = "") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))
        self.ways, self.gain, self.gains, self.unread = ways, 1.0, [1.0, {"a": 1.0}], 0
        self.config, self.function, self.table = Config(), nn.functional.relu, torch.ones(WIDTH)
        self.factor = _one

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.down(self.up(x).relu()) * self.mask * scale
        if self.ways == "number":
            return x + y * self.gain
        if self.ways == "list":
            return x + y * self.gains[1]["a"]
        if self.ways == "object":
            return x + y * self.config.gain
        if self.ways == "function":
            return x + self.function(y)
        if self.ways == "closure":
            return x + y * self.factor()
        if self.ways == "tensor":
            return x + y * self.table
        if self.ways == "missing":
            return x + y * getattr(self, "extra", 1.0)
        if self.ways == "dict":
            return x + y * self.__dict__["gain"]
        if self.ways == "vars":
            return x + y * vars(self)["gain"]
        if self.ways == "itself":
            return x + y * TABLE.get(self, 1.0)
        if self.ways == "global":
            return x + y * SETTINGS.gain
        if self.ways == "parameter":
            return x + y * getattr(self.up.weight, "gain", 1.0)
        if self.ways == "frozen":
            return x + y * (1.0 if self.up.weight.requires_grad else 5.0)
        return x + y


class ById(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) * TABLE.get(id(self.up), 1.0)


class Other(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) * 3.0


@pytest.fixture
def captures(monkeypatch) -> list[nn.Module]:
    """The models that were captured."""
    seen: list[nn.Module] = []
    capture = export_call.capture_program

    def spy(model, *args, **kwargs):
        seen.append(model)
        return capture(model, *args, **kwargs)

    monkeypatch.setattr(export_call, "capture_program", spy)
    TABLE.clear()
    SETTINGS.gain = 1.0
    return seen


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def net(count: int = 2, ways: str = "") -> Net:
    return Net(*(Block(ways) for _ in range(count)))


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(model: nn.Module, x: torch.Tensor, expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(trained(model, x), expected, strict=True):
        assert torch.equal(mine, theirs)


def alone(model: Net, x: torch.Tensor, policy: Policy, backend: str = "eager") -> list[torch.Tensor]:
    """What the model computes with blocks that were converted one by one."""
    full = model(x).detach()
    blocks = [
        ampgraph.convert_blocks(model, f"layers.{i}", policy=_inside(policy, i), backend=backend)
        for i in range(len(model.layers))
    ]
    SETTINGS.gain = 1.0
    found = trained(model, x)
    SETTINGS.gain = 1.0
    for one in blocks:
        one.restore()
    if model.layers[0].ways not in NOT_SEEN:
        close(found[0], full)
    return found


def _inside(policy: Policy, number: int) -> Policy:
    """Leaves out the rules for other blocks."""
    rules = {name: v for name, v in policy.rules.items() if name.split(".")[1:2] != [str(1 - number)]}
    return policy.replace(rules=rules)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_capture_one_plan_one_compilation(captures, backend, level) -> None:
    compiled = []

    def counting(graph_module, inputs):
        compiled.append(graph_module)
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, inputs)

    model, x = net(4), torch.randn(5, WIDTH).requires_grad_()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)
    given = "eager" if backend == "eager" else counting
    policy = FLOAT16.replace(level=level)
    expected = alone(model, x, policy, backend)
    captures.clear()
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=policy, backend=given)
    check(model, x, expected)
    check(model, x, expected)
    assert len(captures) == 1
    assert len(compiled) == (backend != "eager")
    first, *others = blocks.values()
    for block in others:
        assert block.plan is first.plan
        assert block.graph_module is not first.graph_module
        assert block.graph_module.up.weight is block.source.up.weight
        assert block.graph_module.code == first.graph_module.code


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_further_block_writes_no_graph(monkeypatch, backend) -> None:
    written = []
    recompile = fx.GraphModule.recompile
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda self: written.append(self) or recompile(self))
    counts = []
    for count in (2, 6):
        model, x = net(count), torch.randn(5, WIDTH)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.1)
        policy = FLOAT16.replace(level="O2")
        blocks = ampgraph.convert_blocks(model, "layers.*", policy=policy, backend=backend)
        written.clear()
        trained(model, x)
        with torch.no_grad():
            model(x)
        counts.append(len(written))
        assert len(blocks) == count
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_edit_of_a_blocks_graph_is_that_blocks_alone(captures, backend, when) -> None:
    """Of the graph of the plan, and of the graph with the boundary; before and after the first run."""
    for name in ("graph_module", "training_graph"):
        torch.manual_seed(0)
        model, x = net(3), torch.randn(5, WIDTH)
        blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16, backend=backend)
        with torch.no_grad():
            model(x)
        if when == "after":
            [layer(x) for layer in model.layers]
        graph = getattr(blocks["layers.1"], name)
        before = [layer(x) for layer in model.layers]
        (relu,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        relu.target = torch.ops.aten.neg.default
        graph.recompile()
        after = [layer(x) for layer in model.layers]
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True], name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_overflows_are_found_in_the_block_that_has_them(captures, backend) -> None:
    model, x = net(3), torch.randn(5, WIDTH)
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks.scaler.attach(optimizer)
    trained(model, x)
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    model.layers[0](x).sum().backward()
    (model.layers[1](x) * torch.tensor(float("inf"))).sum().backward()
    model.layers[2](x).sum().backward()
    optimizer.step()
    named = {f"layers.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    assert set(blocks.scaler.last_overflow.parameters) <= named
    assert blocks.scaler.last_overflow.parameters
    assert blocks.scaler.get_scale() == 512.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert len(captures) == 1


def test_each_keeps_its_own_graphs(captures) -> None:
    """What changes on one block later changes nothing on the others."""
    model, x = net(3, "number").eval(), torch.randn(5, WIDTH)
    blocks = ampgraph.convert_blocks(model, "layers.*", dtype=torch.bfloat16, backend="aot_eager")
    model(x)
    model.layers[1].gain = 3.0
    model.layers[2].down = nn.Linear(16, WIDTH)
    reference = copy.deepcopy(model)
    for layer in reference.layers:
        del layer.forward
    close(model(x), reference(x))
    assert len(captures) == 3
    graph = blocks["layers.0"].inference_graph
    relu = next(node for node in graph.graph.nodes if "relu" in node.name)
    relu.target = torch.ops.aten.neg.default
    graph.recompile()
    expected = reference.layers[1](x)
    close(model.layers[1](x), expected)
    assert not torch.equal(model.layers[0](x), reference.layers[0](x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backward_reports_to_the_slots_of_its_own_block(backend) -> None:
    model, x = net(3), torch.randn(5, WIDTH)
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16, backend=backend)
    seen: list[list[float]] = []
    blocks.scaler.state.watch(lambda flags: seen.append(flags.tolist()))
    for number, layer in enumerate(model.layers):
        (layer(x) * torch.tensor(float("inf"))).sum().backward()
        assert seen.pop() == [float(i // 4 == number) for i in range(12)] + [0.0]


def _set(path: str, value: object) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        owner, _, name = path.rpartition(".")
        setattr(functools.reduce(getattr, owner.split("."), block) if owner else block, name, value)

    return change


def _with_closure(block: Block) -> None:
    gain = 5.0
    block.factor = lambda: gain


def _hooked(block: Block) -> None:
    block.up.register_forward_hook(lambda module, args, output: output * 5.0)


def _patched(block: Block) -> None:
    forward = block.up.forward
    block.up.forward = lambda x: forward(x) * 5.0


def _buffer(block: Block) -> None:
    block.mask = block.mask.double()


def _wider(block: Block) -> None:
    block.up, block.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)


def _global(block: Block) -> None:
    block.register_forward_pre_hook(lambda *_: setattr(SETTINGS, "gain", 5.0))


DIFFERENCES: dict[str, tuple[str, Callable[[Block], object]]] = {
    "a number": ("number", _set("gain", 5.0)),
    "its type": ("number", _set("gain", torch.tensor(5.0))),
    "a number in containers": ("list", _set("gains", [1.0, {"a": 5.0}])),
    "an object": ("object", _set("config", Config(5.0))),
    "an object that is equal": ("object", _set("config", Config())),
    "a function": ("function", _set("function", torch.sigmoid)),
    "a closure": ("closure", _with_closure),
    "a tensor": ("tensor", _set("table", torch.full((WIDTH,), 5.0))),
    "an attribute that the first lacks": ("missing", _set("extra", 5.0)),
    "an entry of its dict": ("dict", _set("gain", 5.0)),
    "an entry of its vars": ("vars", _set("gain", 5.0)),
    "a place in a table by modules": ("itself", lambda block: TABLE.update({block: 5.0})),
    "a global by then": ("global", _global),
    "an attribute of a parameter": ("parameter", _set("up.weight.gain", 5.0)),
    "requires_grad": ("frozen", _set("up.weight.requires_grad", False)),
    "requires_grad of a bias": ("", _set("up.bias.requires_grad", False)),
    "the mode of a part": ("", lambda block: block.up.eval()),
    "a hook": ("", _hooked),
    "a patched part": ("", _patched),
    "the class of a part": ("", _set("up", nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh()))),
    "a bias that is None": ("", _set("up.bias", None)),
    "a wider layer": ("", _wider),
    "the dtype of a buffer": ("", _buffer),
    "strides": ("", _set("up.weight", nn.Parameter(torch.randn(WIDTH, 16).T))),
    "a shared parameter": ("", lambda block: _set("mask", block.down.bias.detach())(block)),
}


@pytest.mark.parametrize("which", DIFFERENCES)
def test_a_difference_is_another_capture(captures, which) -> None:
    ways, change = DIFFERENCES[which]
    model, x = net(2, ways), torch.randn(5, WIDTH)
    change(model.layers[1])
    policy = Policy(dtype=torch.bfloat16)
    expected = alone(model, x, policy)
    captures.clear()
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=policy)
    check(model, x, expected)
    assert len(captures) == 2
    assert blocks["layers.1"].graph_module is not blocks["layers.0"].graph_module


def test_a_block_that_changes_after_its_capture_still_lends_it(captures) -> None:
    model, x = net(), torch.randn(5, WIDTH)
    policy = Policy(dtype=torch.bfloat16)
    expected = alone(model, x, policy)
    other = ampgraph.convert(copy.deepcopy(model.layers[1]), (x,), policy=policy)(x)
    captures.clear()
    ampgraph.convert_blocks(model, "layers.*", policy=policy)
    model.layers[0](x)
    model.layers[0].add_module("unused", nn.Linear(2, 2))
    assert torch.equal(model.layers[1](x), other)
    assert len(captures) == 1
    del model.layers[0].unused
    check(model, x, expected)


def test_exchanged_parts_of_blocks_are_freed() -> None:
    model, x = net(3), torch.randn(5, WIDTH)
    ampgraph.convert_blocks(model, "layers.*", policy=Policy(dtype=torch.bfloat16), backend="eager")
    model(x)
    old = [weakref.ref(layer.up.weight) for layer in model.layers]
    for layer in model.layers:
        layer.up = nn.Linear(WIDTH, 16)
    model(x)
    gc.collect()
    assert [weight() for weight in old] == [None] * 3


def test_the_others_keep_their_graphs_if_the_parts_of_one_are_exchanged(captures) -> None:
    model, x = net(3), torch.randn(5, WIDTH)
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=Policy(dtype=torch.bfloat16))
    model(x)
    graphs = [block.graph_module for block in blocks.values()]
    model.layers[0].up = nn.Linear(WIDTH, 16)
    captures.clear()
    expected = alone(net_like(model), x, Policy(dtype=torch.bfloat16))
    captures.clear()
    check(model, x, expected)
    assert len(captures) == 1
    assert [block.graph_module is graph for block, graph in zip(blocks.values(), graphs, strict=True)] == [
        False,
        True,
        True,
    ]


def test_other_classes_rules_and_arguments_are_other_captures(captures) -> None:
    x = torch.randn(5, WIDTH)
    for model, given, count in (
        (Net(Block(), Other()), {}, 2),
        (net(), {"rules": {"layers.1.down": "fp32"}}, 2),
        (net(), {"rules": {"*.down": "fp32"}}, 1),
    ):
        policy = Policy(dtype=torch.bfloat16, **given)
        expected = alone(model, x, policy)
        captures.clear()
        ampgraph.convert_blocks(model, "layers.*", policy=policy)
        check(model, x, expected)
        assert len(captures) == count
    model = net()
    ampgraph.convert_blocks(model, "layers.*", dtype=torch.bfloat16)
    captures.clear()
    model.layers[0](x, 1.0)
    close(model.layers[1](x, 5.0), Block.forward(model.layers[1], x, 5.0))
    assert len(captures) == 2
    model.layers[1](torch.randn(3, WIDTH), 1.0)
    assert len(captures) == 3


def test_tables_by_ids(captures) -> None:
    model, x, policy = Net(ById(), ById()), torch.randn(5, WIDTH), Policy(dtype=torch.bfloat16)
    TABLE[id(model.layers[1].up)] = 5.0
    expected = alone(model, x, policy)
    captures.clear()
    ampgraph.convert_blocks(model, "layers.*", policy=policy)
    check(model, x, expected)
    assert len(captures) == 2


def test_unread_differences_and_weights_do_not_count(captures) -> None:
    """A plan depends on the size of weights: a block whose weights leave the low range has its own plan."""
    model, x = net(3), torch.randn(5, WIDTH)
    for number, block in enumerate(model.layers):
        block.unread = number
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)
        x[:, 0] = 0.0
        model.layers[0].down.weight[0] = model.layers[1].down.weight[0] = model.layers[0].down.bias[0] = 0.0
        model.layers[1].down.bias[0] = 0.0
        model.layers[2].up.weight[:, 0] = 1e5
    policy = FLOAT16.replace(loss_scale=DynamicLossScale(init_scale=1.0))
    expected = alone(model, x, policy)
    captures.clear()
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=policy)
    check(model, x, expected)
    assert len(captures) == 1
    low = [{d.dtype for d in b.plan.decisions.values()} for b in blocks.values()]
    assert blocks["layers.1"].plan is blocks["layers.0"].plan
    assert blocks["layers.2"].plan.decisions != blocks["layers.0"].plan.decisions
    assert all(torch.float16 in dtypes for dtypes in low)


def test_state_that_changed_since_counts(captures) -> None:
    """The first block was captured with a value that both share and that is another by now."""
    model, x = net(2, "object"), torch.randn(5, WIDTH)
    config = model.layers[0].config = model.layers[1].config = Config()
    ampgraph.convert_blocks(model, "layers.*", dtype=torch.bfloat16)
    model.layers[0](x)
    config.gain = 5.0
    expected = x + 5.0 * model.layers[1].down(model.layers[1].up(x).relu())
    close(model.layers[1](x), expected)
    assert len(captures) == 2


def test_what_blocks_share_is_looked_into_once(captures, monkeypatch) -> None:
    """A shared configuration is looked into for the first block; a change of it counts for all."""
    model, x = net(3, "object"), torch.randn(5, WIDTH)
    config = Config()
    config.inner = Config()
    for block in model.layers:
        block.config = config
    opened = []
    look_into = Places._look_into

    def spy(self, value, path, depth):
        opened.append(value)
        return look_into(self, value, path, depth)

    monkeypatch.setattr(Places, "_look_into", spy)
    ampgraph.convert_blocks(model, "layers.*", dtype=torch.bfloat16)
    check(model, x, alone(net_like(model), x, Policy(dtype=torch.bfloat16)))
    assert sum(value is config.inner for value in opened) == 1
    for change in (lambda: setattr(config, "gain", 5.0), lambda: setattr(config.inner, "gain", 5.0)):
        captures.clear()
        change()
        check(model, x, alone(net_like(model), x, Policy(dtype=torch.bfloat16)))
        assert len(captures) == 4  # one for the three blocks, three alone


def net_like(model: Net) -> Net:
    """Returns a model with the same state that is not converted."""
    made = net(len(model.layers), model.layers[0].ways)
    made.load_state_dict(model.state_dict())
    for mine, theirs in zip(made.layers, model.layers, strict=True):
        mine.config = copy.deepcopy(theirs.config)
    return made


def test_copies_begin_without_captures(captures) -> None:
    model, x = net(2).eval(), torch.randn(5, WIDTH)
    ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        captures.clear()
        assert torch.equal(other(x), expected)
        assert len(captures) == 1
        with torch.no_grad():
            other.layers[1].down.weight.zero_()
        assert torch.equal(model(x), expected)
