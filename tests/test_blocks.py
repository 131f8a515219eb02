"""`convert_blocks`: submodules converted in place, under one loss scale."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, Policy, PolicyError
from ampgraph.testing import assert_dtype
from ampgraph.training import distributed

from .helpers import close

FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        hidden = nn.functional.dropout(self.up(x).relu(), training=self.training)
        return x + gain * self.down(hidden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(4, 8), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, gain=0.5)
        return self.head(x)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_model_stays_what_it_was_and_runs_low(backend) -> None:
    model, x = Net().eval(), torch.randn(5, 4)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    output, expected = model(x), gradients(model, x)
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16, backend=backend)
    assert list(blocks) == ["layers.0", "layers.1"]
    assert [type(layer) for layer in model.layers] == [Block, Block]
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    close(model(x), output)
    for low, full in zip(gradients(model, x), expected, strict=True):
        close(low, full)
    for block in blocks.values():
        assert_dtype(block, "up", torch.float16)
    assert model.head(torch.randn(1, 8)).dtype == torch.float32


def test_which_blocks() -> None:
    def paths(*which: str | type) -> list[str]:
        return list(ampgraph.convert_blocks(Net(), which))

    assert paths(Block) == ["layers.0", "layers.1"]
    assert paths("layers.*.up", "head") == ["layers.0.up", "layers.1.up", "head"]
    assert paths(Block, nn.Linear) == ["embed", "layers.0", "layers.1", "head"]
    assert paths("") == [""]
    assert paths("*") == ["embed", "layers", "head"]
    assert list(ampgraph.convert_blocks(Net(), ["embed", nn.Linear])) == [
        "embed",
        "layers.0.up",
        "layers.0.down",
        "layers.1.up",
        "layers.1.down",
        "head",
    ]


def test_gradients_between_blocks_do_not_underflow() -> None:
    model, x = Net().eval(), torch.randn(5, 4)
    reference = copy.deepcopy(model)
    ampgraph.convert_blocks(model, "layers.*", dtype=torch.float16)
    for each in (model, reference):
        (each(x).sum() * 1e-9).backward()  # the smallest float16 is 6e-8
    for low, full in zip(model.parameters(), reference.parameters(), strict=True):
        close(low.grad * 1e9, full.grad * 1e9)


def test_one_scaler_skips_for_all_and_names_the_block() -> None:
    model = Net()
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16)
    assert all(block.scaler is blocks.scaler for block in blocks.values())
    optimizer = torch.optim.AdamW(model.parameters())
    blocks.scaler.attach(optimizer)
    gradients(model, torch.randn(5, 4))
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model.layers[1](torch.randn(5, 8) / 0).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert set(blocks.scaler.last_overflow.parameters) == {"layers.1.up.weight", "layers.1.down.weight"}
    assert blocks.scaler.get_scale() == 512.0


def test_a_bad_gradient_outside_of_the_blocks_skips_too() -> None:
    model = Net()
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks.scaler.attach(optimizer)
    (model(torch.randn(5, 4)).sum() + (model.head(torch.randn(5, 8) / 0) * 0).sum()).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert blocks.scaler.last_overflow.parameters == ("head.weight",)


def test_rules_name_modules_of_the_whole_model() -> None:
    def dtypes(rules: dict[str, str]) -> list[list[torch.dtype]]:
        model = Net()
        blocks = ampgraph.convert_blocks(model, "layers.*", policy=Policy(rules=rules), dtype=torch.float16)
        model(torch.randn(5, 4))
        graphs = [block.graph_module.graph for block in blocks.values()]
        return [[n.meta["val"].dtype for n in g.nodes if "linear" in n.name] for g in graphs]

    low, full = torch.float16, torch.float32
    assert dtypes({"layers.1.down": "fp32"}) == [[low, low], [low, full]]
    assert dtypes({"*.up": "fp32"}) == [[full, low], [full, low]]
    assert dtypes({"layers": "fp32"}) == [[full, full], [full, full]]
    assert dtypes({"layers": "fp32", "layers.0": "low"}) == [[low, low], [full, full]]
    assert dtypes({"layers.0": "fp32", "layers.0.up": "low"}) == [[low, full], [low, low]]


@pytest.mark.parametrize(
    ("which", "given", "message"),
    [
        ("layer.*", {}, r"'layer\.\*' matches no module. Did you mean"),
        (nn.Conv2d, {}, "'Conv2d' matches no module"),
        (3, {}, "takes globs of module paths and module classes, got 3"),
        ("layers.*", {"policy": Policy(rules={"head": "low"})}, "rule 'head' matches no module in a block"),
        ("layers.*", {"policy": Policy(rules={"node:linear": "low"})}, "'node:linear' names a node"),
        ("layers.*", {"policy": Policy(rules={"*.up": "low", "*0.up": "fp32"})}, "contradictory rules"),
        ("layers.*", {"policy": FLOAT16.replace(keep_io_dtypes=False)}, "underflow"),
        ("layers.*", {"backend": "nonsense"}, "nonsense"),
    ],
)
def test_what_makes_no_sense_is_an_error_and_changes_nothing(which, given, message) -> None:
    model = Net()
    with pytest.raises(PolicyError, match=message):
        ampgraph.convert_blocks(model, which, **given)
    assert not any("forward" in vars(m) for m in model.modules())


def test_converting_twice_is_an_error() -> None:
    model = Net()
    ampgraph.convert_blocks(model, "layers.0")
    for which in ("layers.*", "layers", "layers.0"):
        with pytest.raises(PolicyError, match="converted already"):
            ampgraph.convert_blocks(model, which)
    ampgraph.convert_blocks(model, "layers.1")


def test_an_export_of_the_whole_model_needs_the_graphs_of_its_blocks() -> None:
    model, x = Net().eval(), torch.randn(2, 4)
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16)
    told = r"layers\.0: Block is converted already and has no graph for .* Call the whole model once with"
    with pytest.raises(ampgraph.CaptureError, match=told):
        torch.export.export(model, (x,))
    amp = ampgraph.convert(model, (x,), policy=FLOAT16, capture="ahead of time")  # captures their sources
    expected = model(x)
    close(amp(x), expected)
    close(torch.export.export(model, (x,)).module()(x), expected)
    blocks.restore()
    close(ampgraph.convert(model, (x,), policy=FLOAT16, capture="ahead of time")(x), expected)


def test_what_cannot_be_captured_names_its_block() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    model = nn.Sequential(nn.Linear(4, 4), Branching())
    ampgraph.convert_blocks(model, Branching, capture="ahead of time")
    with pytest.raises(ampgraph.CaptureError, match=r"^1: Branching could not be captured"):
        model(torch.randn(2, 4))


def test_blocks_with_one_reason_are_captured_just_in_time_with_one_warning() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else -x

    model, x = nn.Sequential(*(Branching() for _ in range(3))), torch.ones(2, 4)
    ampgraph.convert_blocks(model, Branching, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(x)
    found = [str(w.message) for w in told if "captured just in time instead" in str(w.message)]
    assert len(found) == 1
    assert found[0].startswith("0: Branching")
    assert found[0].endswith("Other blocks with this reason are not named.")


def test_training_mode_hooks_and_other_shapes() -> None:
    model, seen = Net(), []
    blocks = ampgraph.convert_blocks(model, "layers.*", dtype=torch.bfloat16)
    model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    x = torch.randn(5, 4)
    assert not torch.equal(model(x), model(x))  # dropout
    model.eval()
    assert torch.equal(model(x), model(x))
    assert model(torch.randn(3, 4)).shape == (3, 3)
    assert [tuple(shape) for shape in seen] == [(5, 8)] * 4 + [(3, 8)]
    assert len(blocks["layers.0"].graph_modules) == 3


def test_copies_are_converted_and_independent() -> None:
    model, x = Net().eval(), torch.randn(5, 4)
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    blocks.scaler.attach(optimizer)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        scalers = {id(layer.forward.scaler) for layer in other.layers}
        assert len(scalers) == 1
        assert id(blocks.scaler) not in scalers
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other.layers[0].up.weight.zero_()
        assert not torch.equal(other(x), expected)
        assert torch.equal(model(x), expected)
        assert_dtype(other.layers[0].forward.amp, "up", torch.float16)
        other(x).sum().backward()
        assert model.layers[0].up.weight.grad is None


def test_a_model_copied_together_with_its_blocks_has_their_scaler() -> None:
    model, x = Net(), torch.randn(5, 4)
    blocks = ampgraph.convert_blocks(model, "layers.*", dtype=torch.float16)
    copied, of_copy = copy.deepcopy((model, blocks))
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    of_copy.scaler.attach(optimizer)
    before = [p.detach().clone() for p in copied.parameters()]
    (copied(x).float().mean() * float("inf")).backward()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, copied.parameters(), strict=True))
    assert of_copy.scaler.get_scale() < blocks.scaler.get_scale()


def test_copies_of_trained_blocks_stay_float32_at_o3() -> None:
    model, x = Net().train(), torch.randn(5, 4)
    ampgraph.convert_blocks(model, "layers.*", policy="O3", dtype=torch.bfloat16)
    model(x)
    copied = copy.deepcopy(model).eval()
    copied(x)
    assert copied.layers[0].up.weight.dtype == torch.float32


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_levels_that_keep_low_weights(level) -> None:
    model, x = Net().eval(), torch.randn(5, 4)
    expected = model(x)
    ampgraph.convert_blocks(model, "layers.*", policy=level, dtype=torch.bfloat16)
    low = model(x)
    close(low, expected)
    assert (model.layers[0].up.weight.dtype == torch.bfloat16) == (level == "O3")
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), low)
    stored = [m.layers[0].forward.amp.stored_low for m in (copied, model)]
    assert stored[0] == stored[1]
    assert ("up.weight" in stored[0]) == (level == "O3")
    with torch.no_grad():
        model.layers[0].down.weight.zero_()
        model.layers[1].down.weight.zero_()
    assert not torch.equal(model(x), low)


@pytest.mark.parametrize(
    ("sharded", "which"),
    [
        (["", "model.layers.0", "model.layers.1"], "'model.layers.*'"),
        (["layers.0.mlp.experts.3", "head"], "['layers.*.mlp.experts.*', 'head']"),
        ([""], "'layers.*'"),
    ],
)
def test_the_advice_for_sharded_modules_is_a_call_that_works(sharded: list[str], which: str) -> None:
    assert f"ampgraph.convert_blocks(model, {which})" in distributed._advice(sharded)
