"""`ampgraph.calibrate`: statistics over batches, fingerprints, and no change of the model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph.errors import AmpGraphError
from ampgraph.numerics.statistics import ValueStatistics, blocks
from ampgraph.passes.analysis.fingerprint import fingerprint
from ampgraph.report.replan import without_casts

pytestmark = pytest.mark.usefixtures("shared_captures")
F16 = torch.float16


class Net(nn.Module):
    """Two layers, dropout, a buffer that forward writes, and a value out of range."""

    def __init__(self, width: int = 16, eps: float = 1e-5) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(8, width), nn.Linear(width, 4), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(width, eps=eps)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        y = self.last(self.drop(self.norm(self.first(x).relu())))
        self.seen[1:].add_(y.detach().sum(0)[1:])
        return y * 1000.0 * gain


def convert(model: nn.Module, x: Tensor | None = None, level: str = "O2") -> ampgraph.AmpModule:
    policy = ampgraph.Policy(level=level, dtype=F16, loss_scale=ampgraph.StaticLossScale(8.0))
    return ampgraph.convert(model, None if x is None else (x,), policy=policy, backend="eager")


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


@pytest.fixture
def batches() -> list[tuple[Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(16, 8) * 10**i,) for i in range(3)]


def test_statistics_equal_those_of_all_values_at_once() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(40, 50) * 10.0 ** (6 * i - 9) for i in range(3)]
    parts[1][0, 0], parts[2][3, 4], parts[0][5:9] = math.inf, math.nan, 0
    found = ValueStatistics(F16)
    for part in parts:
        found.add(part)
    every = torch.stack(parts)
    finite = every[every.isfinite() & (every != 0)].abs()
    assert (found.elements, found.zeros, found.nonfinite) == (6000, 200, 2)
    assert (found.peak, found.smallest) == (float(finite.max()), float(finite.min()))
    assert found.zeroed_share == float((finite.half() == 0).sum()) / 5800
    assert found.beyond_share == float(finite.half().isinf().sum()) / 5800
    exponents = finite.log2().floor().long().tolist()
    assert found.exponents == {e: exponents.count(e) for e in set(exponents)}
    assert ValueStatistics.from_dict(found.to_dict(), F16) == found


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_cover_every_element_once(size: int) -> None:
    for tensor in (
        torch.arange(60).view(3, 4, 5),
        torch.arange(6).expand(5, 6),
        torch.arange(60).view(3, 20).T,
    ):
        found = [piece for (piece,) in blocks(tensor, size=size)]
        assert all(piece.numel() <= size for piece in found)
        assert all(p.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for p in found)
        assert sorted(torch.cat([p.flatten() for p in found]).tolist()) == sorted(tensor.flatten().tolist())


@pytest.mark.parametrize("jit", [False, True])
def test_values_over_batches(batches, jit: bool) -> None:
    model = Net().eval()
    amp = convert(model, None if jit else batches[0][0])
    found = ampgraph.calibrate(amp, batches)
    results = torch.stack([model.last(model.norm(model.first(x).relu())) * 1000 for (x,) in batches]).detach()
    (graph,) = found.graphs.values()
    names = [name for name in graph.values if name.startswith("mul")]
    row = found.row(names[0])
    assert row.peak == pytest.approx(float(results.abs().max()), rel=1e-4)
    assert row.beyond == int(results.half().isinf().sum()) > 0
    assert row.elements == results.numel()
    assert found.batches == 3
    assert not graph.gradients


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_over_batches_and_model_unchanged(batches, jit: bool) -> None:
    model = Net().train()
    model.drop.p = 0.0
    amp = convert(model, None if jit else batches[0][0])
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    found = ampgraph.calibrate(amp, batches, loss=loss_of)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    peaks = []
    for (x,) in batches:
        model.zero_grad()
        loss_of(model(x)).backward()
        peaks.append(float(model.last.weight.grad.abs().max()) * 8)
    (graph,) = found.graphs.values()
    (name,) = [n for n in graph.gradients if "last" in n and "weight" in n]
    assert found.row(name, "backward").peak == pytest.approx(max(peaks), rel=1e-4)
    assert found.row(name, "backward").elements == 3 * model.last.weight.numel()
    assert found.scale == 8
    assert any(name.startswith("relu") for name in graph.gradients)


def test_batches_may_be_dicts_and_tensors(batches) -> None:
    amp = convert(Net().eval(), batches[0][0])
    dicts = ampgraph.calibrate(amp, [{"x": x} for (x,) in batches])
    tensors = ampgraph.calibrate(amp, (x for (x,) in batches))
    assert list(dicts.graphs.values()) == list(tensors.graphs.values())


def test_save_and_load(batches, tmp_path: Path) -> None:
    amp = convert(Net().train(), batches[0][0])
    found = ampgraph.calibrate(amp, batches, loss=loss_of)
    found.save(tmp_path / "new" / "ranges.json")
    assert ampgraph.Calibration.load(tmp_path / "new" / "ranges.json") == found
    for text in ("{}", "[]", "no", '{"format": "ampgraph calibration 0"}'):
        with pytest.raises(AmpGraphError, match="not the JSON of a Calibration"):
            ampgraph.Calibration.from_json(text)


def test_evidence_holds_for_other_levels_sizes_and_weights(batches) -> None:
    found = ampgraph.calibrate(convert(Net().train(), batches[0][0]), batches)
    for level in ("O1", "O3"):
        amp = convert(Net().train(), torch.randn(5, 8), level)
        assert found.of(without_casts(amp.graph_module, amp.plan)).values["relu"].peak > 0


def test_evidence_of_other_batch_sizes_is_one_graph() -> None:
    sizes = [(torch.randn(n, 8),) for n in (16, 16, 5, 3)]
    found = ampgraph.calibrate(convert(Net().train(), sizes[0][0]), sizes)
    assert len(found.graphs) == 1
    assert found.row("relu").elements == (16 + 16 + 5 + 3) * 16


@pytest.mark.parametrize(
    "change",
    [
        lambda: Net(width=17).train(),
        lambda: Net(eps=1e-3).train(),
        lambda: Net().eval(),
        lambda: nn.Linear(8, 4),
    ],
)
def test_stale_evidence_is_refused(batches, change) -> None:
    found = ampgraph.calibrate(convert(Net().train(), batches[0][0]), batches)
    amp = convert(change(), batches[0][0])
    with pytest.raises(AmpGraphError, match="calibration of Net has no statistics of this graph"):
        found.of(without_casts(amp.graph_module, amp.plan))


def test_fingerprint_is_that_of_the_planned_graph(batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that a policy is about to plan: clones that isolate written memory count for nothing."""
    seen = []
    from ampgraph.passes.place import PlaceCasts

    original = PlaceCasts.run
    monkeypatch.setattr(
        PlaceCasts, "run", lambda self, graph: (seen.append(fingerprint(graph)), original(self, graph))[1]
    )
    amp = convert(Net(width=17).train(), batches[0][0])  # no other test plans this width
    assert seen == [fingerprint(without_casts(amp.graph_module, amp.plan))]
    assert any(n.target is torch.ops.aten.add_.Tensor for n in amp.graph_module.graph.nodes)


def test_progress_bar(batches, capsys: pytest.CaptureFixture) -> None:
    amp = convert(Net().eval(), batches[0][0])
    ampgraph.calibrate(amp, batches)
    assert capsys.readouterr().err == ""
    ampgraph.calibrate(amp, batches, progress=True)
    assert "calibrating [##############################] 3/3" in capsys.readouterr().err
    ampgraph.calibrate(amp, iter(batches), progress=True)
    assert "calibrating 3," in capsys.readouterr().err


def test_text_lists_what_does_not_fit_first(batches) -> None:
    found = ampgraph.calibrate(convert(Net().eval(), batches[0][0]), batches)
    title, _, heading, _, first, *_ = str(found).splitlines()
    assert title == "Net, 3 batches, float16"
    assert heading.split()[:3] == ["node", "of", "peak"]
    assert first.split()[0].startswith("mul")


@pytest.mark.parametrize(
    ("batches", "message"),
    [([], "batches is empty"), ([[torch.ones(2, 8)]], "batch 1 is a list"), ([3], "batch 1 is a int")],
)
def test_wrong_batches_are_refused(batches, message: str) -> None:
    with pytest.raises(AmpGraphError, match=message):
        ampgraph.calibrate(convert(Net().eval(), torch.randn(2, 8)), batches)


def test_wrong_models_losses_and_names_are_refused(batches) -> None:
    amp = convert(Net().eval(), batches[0][0])
    with pytest.raises(AmpGraphError, match=r"ampgraph\.convert"):
        ampgraph.calibrate(nn.Linear(8, 4), batches)
    with pytest.raises(AmpGraphError, match="loss=1"):
        ampgraph.calibrate(amp, batches, loss=1)
    found = ampgraph.calibrate(amp, batches)
    with pytest.raises(AmpGraphError, match="Did you mean 'relu'"):
        found.row("rellu")
    with pytest.raises(AmpGraphError, match="direction='up'"):
        found.row("relu", "up")
