"""`ampgraph.tune`: budgets are met at little traffic, in few runs, and nothing else changes."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import AmpGraphError, Policy, PolicyError
from ampgraph.cli.main import main
from ampgraph.tune_model import tuned
from ampgraph.tuning.candidates import Candidates
from ampgraph.tuning.result_error import ResultError
from ampgraph.tuning.sensitivity import Probes, Sensitivity
from ampgraph.tuning.tuner import RUNS

from .small_graphs import EverySet, SmallModel
from .zoo import models as zoo

pytestmark = pytest.mark.usefixtures("shared_captures")
F16, BF16 = torch.float16, torch.bfloat16
REAL = ("transformers/bert", "transformers/llama", "timm/vit_tiny_patch16_224", "timm/convnext_atto")


class Net(nn.Module):
    """Matrix products, a norm, dropout and a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.mid = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(64, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        self.calls += 1
        y = self.norm(self.up(x))
        y = nn.functional.gelu(self.mid(self.drop(y))) + y
        return self.head(y * torch.sigmoid(y)) * gain


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


def relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).detach().double().norm() / true.detach().double().norm())


def test_a_met_budget_needs_no_rules(net: Net, x: Tensor) -> None:
    found = tuned(net, [(x,)], 1.0, F16)
    assert found.policy.rules == {}
    assert found.policy == Policy("O2", F16)
    assert found.runs == (2, 0)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_policy_replays_bit_for_bit(net: Net, x: Tensor, dtype: torch.dtype, level: str) -> None:
    start = tuned(net, [(x,)], 1.0, dtype, level=level).error
    found = tuned(net, [(x,)], 0.6 * start, dtype, level=level)
    assert found.policy.rules
    assert set(found.policy.rules.values()) == {"fp32"}
    policy = Policy.from_json(found.policy.to_json())
    assert policy == found.policy
    with torch.no_grad():
        results = [ampgraph.convert(net, (x,), policy=p, backend="eager")(x) for p in (policy, found.policy)]
        assert torch.equal(*results)
        assert relative(results[0], net(x)) == found.error <= 0.6 * start
    assert found.runs[0] <= RUNS


def test_traffic_falls_as_the_budget_rises(net: Net, x: Tensor) -> None:
    start = tuned(net, [(x,)], 1.0, BF16)
    shares = [tuned(net, [(x,)], share * start.error, BF16).traffic / start.traffic for share in (0.4, 0.95)]
    assert 1 <= shares[1] < shares[0]


def test_the_model_stays_as_it_was(net: Net, x: Tensor) -> None:
    net.train()
    before, training = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    gradient = torch.ones_like(net.head.weight)
    net.head.weight.grad = gradient
    drawn = torch.random.get_rng_state()
    batch = {"x": x.clone(), "gain": 2.0}
    found = tuned(net, [batch], 1e-4, F16)
    assert found.error <= 1e-4
    assert found.runs[0] > 2
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert [m.training for m in net.modules()] == training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.head.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert all(p.grad is None for p in net.parameters() if p is not net.head.weight)
    assert torch.equal(batch["x"], x)
    assert all(p.requires_grad for p in net.parameters())


def test_dropout_draws_the_same_in_both(net: Net, x: Tensor) -> None:
    """Else no low policy could meet a budget in training mode."""
    net.train()
    start = tuned(net, [(x,)], 1.0, F16)
    assert start.error < 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["transformers/gpt2", *REAL])
def test_budgets_are_met_on_real_models(name: str) -> None:
    model, args, kwargs = zoo.get(name).seeded()
    model.eval()
    batch = kwargs or args
    start = tuned(model, [batch], 1.0, BF16)
    found = tuned(model, [batch], 0.5 * start.error, BF16)
    assert found.error <= 0.5 * start.error
    assert found.runs[0] <= RUNS
    amp = ampgraph.convert(model, args, kwargs, policy=Policy.from_json(found.policy.to_json()))
    error = ResultError(None)
    with torch.no_grad():
        assert error.of([amp(*args, **kwargs)], [model(*args, **kwargs)]) == found.error


def test_several_batches_and_a_metric(net: Net, x: Tensor) -> None:
    seen = []

    def metric(results: list[Tensor], references: list[Tensor]) -> float:
        seen.append((len(results), len(references)))
        return max(float((a - b).abs().max()) for a, b in zip(results, references, strict=True))

    batches = [(x,), (x[:8] * 3,), x]
    start = tuned(net, batches, 1.0, F16, metric=metric)
    found = tuned(net, iter(batches), 0.5 * start.error, F16, metric=metric)
    assert found.error <= 0.5 * start.error
    assert found.runs[0] <= RUNS
    assert set(seen) == {(3, 3)}
    amp = ampgraph.convert(net, (x,), policy=found.policy, backend="eager")
    with torch.no_grad():
        assert max(float((amp(b) - net(b)).abs().max()) for b in (x, x[:8] * 3)) == found.error


def test_the_difference_of_the_loss(net: Net, x: Tensor) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.net(x)
            return {"loss": y.square().mean(), "scores": y}

    model = WithLoss().eval()
    found = tuned(model, [(x,)], 1e-7, F16, metric="loss")
    amp = ampgraph.convert(model, (x,), policy=found.policy, backend="eager")
    with torch.no_grad():
        assert abs(float(amp(x)["loss"].double() - model(x)["loss"].double())) == found.error <= 1e-7


class TwoReaders(nn.Module):
    """A residual sum and a layer that counts little read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.side = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x))
        return y + self.side(y) * 1e-3


def test_what_one_reader_rounds_costs_what_that_reader_makes_of_it(x: Tensor) -> None:
    """The sum needs the exact values; the layer may read rounded ones."""
    torch.manual_seed(0)
    found = tuned(TwoReaders().eval(), [(x,)], 1e-5, F16)
    assert found.error <= 1e-5
    assert "node:linear" in found.policy.rules
    assert "node:linear_1" not in found.policy.rules


def test_errors_of_outputs_that_are_alike_scatter_more(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one number decides all outputs, the squared error has one degree of freedom."""
    seen: list[float] = []
    result = Probes.result

    def noted(self: Probes, graphs: list) -> Sensitivity:
        found = result(self, graphs)
        seen.append(found.scatter)
        return found

    monkeypatch.setattr(Probes, "result", noted)
    monkeypatch.setattr("ampgraph.tuning.tuner.PROBES", 256)
    torch.manual_seed(0)
    copies = nn.Upsample(1000)
    for model in (nn.Sequential(nn.Linear(16, 1), copies), nn.Linear(16, 1000)):
        tuned(model.eval(), [(x[None, :1],)], 0.0, F16)
    alike, free = seen
    assert alike == pytest.approx(2**0.5, abs=0.3)
    assert free < 0.4


def test_what_is_left_of_the_budget_is_given_back(
    net: Net, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a plan that keeps everything in float32, pins are taken back one by one."""
    monkeypatch.setattr(Candidates, "search", lambda self, limit: [self.everything])
    start, exact = (tuned(net, [(x,)], budget, F16) for budget in (1.0, 0.0))
    found = tuned(net, [(x,)], 0.95 * start.error, F16)
    assert found.traffic < exact.traffic
    assert 0 < found.error <= 0.95 * start.error


def test_what_overflows_stays_float32() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x) * 1000.0 * 1000.0
            return self.head(y / y.abs().amax())

    torch.manual_seed(0)
    model, x = Wide(), torch.randn(8, 16)
    policy = Policy("O2", F16, hazards=False)
    found = tuned(model, [(x,)], 0.05, F16, level=policy)
    assert found.start[0] == math.inf
    assert found.error <= 0.05
    assert "node:mul_1" in found.policy.rules


def test_ranges_of_a_calibration_are_evidence(net: Net, x: Tensor) -> None:
    amp = ampgraph.convert(net, (x,), policy="O2", dtype=F16, backend="eager")
    ranges = ampgraph.calibrate(amp, [(x,), (x * 1e6,)])
    assert tuned(net, [(x,)], 1.0, F16).policy.rules == {}
    found = tuned(net, [(x,)], 1.0, F16, calibration=ranges)
    assert "node:linear" in found.policy.rules
    amp = ampgraph.convert(net, (x,), policy=found.policy, backend="eager")
    with torch.no_grad():
        assert amp(x * 1e6).isfinite().all()


def test_rules_and_guards_of_the_policy_are_kept(net: Net, x: Tensor) -> None:
    policy = Policy("O2", BF16, rules={"head": "fp32", "node:linear_1": "low"})
    found = tuned(net, [(x,)], 1e-3, level=policy)
    assert found.policy.rules["head"] == "fp32"
    assert found.error <= 1e-3


def test_just_in_time(net: Net, x: Tensor) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = net, nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            if float(y.sum()) > 1e9:
                return y
            return self.last(y)

    torch.manual_seed(0)
    model = Broken().eval()
    with pytest.warns(UserWarning, match="just in time"):
        start = tuned(model, [(x,)], 1.0, BF16)
    with pytest.warns(UserWarning, match="just in time"):
        found = tuned(model, [(x,)], 0.6 * start.error, BF16)
    assert found.policy.rules
    assert found.error <= 0.6 * start.error
    amp = ampgraph.convert(model, policy=found.policy, backend="eager")
    with torch.no_grad():
        assert relative(amp(x), model(x)) == found.error


def test_auto(net: Net, x: Tensor) -> None:
    amp = ampgraph.convert(net, (x * 100,), policy="auto", dtype=BF16)
    with torch.no_grad():
        assert relative(amp(x * 100), net(x * 100)) <= 1e-2
    assert amp.policy == ampgraph.tune(net, [(x * 100,)], dtype=BF16, budget=1e-2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": math.nan}, "budget=nan"),
        ({"budget": "small"}, "budget='small'"),
        ({"budget": -1}, "budget=-1"),
        ({"budget": True}, "budget=True"),
        ({"batches": []}, "batches is empty"),
        ({"batches": torch.ones(2, 16)}, "batches is a Tensor"),
        ({"batches": [3]}, "batch 1 is a int"),
        ({"dtype": "float61"}, "Did you mean 'float16'"),
        ({"level": "O0"}, "legal: 'O1', 'O2'"),
        ({"level": Policy("O3")}, "legal: 'O1', 'O2'"),
        ({"level": "02"}, "legal: O0, O1"),
        ({"metric": "los"}, "Did you mean 'loss'"),
        ({"metric": lambda results, references: "much"}, "metric returned a str"),
        ({"metric": "loss"}, "returns no loss but a Tensor"),
        ({"metric": lambda results, references: 1.0}, "not met even with every op in float32"),
        ({"metric": lambda results, references: math.nan}, "not finite even with .* the metric returns NaN"),
        ({"calibration": {}}, "calibration must be"),
    ],
)
def test_bad_input_is_refused(net: Net, x: Tensor, given: dict, message: str) -> None:
    known = {"batches": [(x,)], "dtype": F16, "budget": 1e-4} | given
    with pytest.raises(AmpGraphError, match=message):
        ampgraph.tune(net, known.pop("batches"), **known)


def test_auto_without_inputs_is_refused(net: Net) -> None:
    with pytest.raises(PolicyError, match="example inputs"):
        ampgraph.convert(net, policy="auto")
    with pytest.raises(PolicyError, match=r"ampgraph\.tune"):
        Policy.of("auto")


def test_a_converted_model_is_refused(net: Net, x: Tensor) -> None:
    with pytest.raises(PolicyError, match="converted already"):
        ampgraph.tune(ampgraph.convert(net, (x,)), [(x,)], budget=1e-2)


def test_progress_is_shown(net: Net, x: Tensor, capsys: pytest.CaptureFixture) -> None:
    ampgraph.tune(net, [(x,)], dtype=F16, budget=1e-4, progress=True)
    assert "tuning 3" in capsys.readouterr().err
    ampgraph.tune(net, [(x,)], dtype=F16, budget=1e-4)
    assert capsys.readouterr().err == ""


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "tuned.json"
    options = ["tune", "tests.test_tune:built", "--dtype", "float16", "--budget", "3e-4", "--json", "-q"]
    assert main([*options, "--save-policy", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["error"] <= 3e-4 < report["without_rules"]["error"]
    assert Policy.of(str(path)) == Policy.from_dict(report["policy"])
    assert main([*options[:4], "--budget", "nan"]) == 2
    assert "budget=nan" in capsys.readouterr().err


def built() -> tuple[nn.Module, tuple]:
    """Returns a model for the command line."""
    torch.manual_seed(0)
    return Net().eval(), (torch.randn(32, 16),)


# -- the best by trying everything -----------------------------------------------------------------


def at_the_best(seed: int) -> list[bool]:
    """Whether tuning finds the least traffic of all sets of pins, for two budgets."""
    model, draw = SmallModel(seed), random.Random(seed)
    x, dtype = torch.randn(draw.choice((16, 64, 128)), 16), (F16, BF16)[seed % 2]
    every = EverySet(model, x, dtype)
    hits = []
    for share in (0.7, 0.35):
        budget = share * every.start.error
        best, found = every.best(budget), tuned(model, [(x,)], budget, dtype)
        assert found.error <= budget
        assert found.runs[0] <= RUNS
        hits.append(found.traffic <= best.traffic)
    return hits


def test_the_best_of_every_set_of_pins() -> None:
    assert at_the_best(4) == at_the_best(8) == [True, True]


@pytest.mark.exhaustive
def test_at_least_four_of_five_small_graphs_are_at_the_best() -> None:
    hits: list[bool] = []
    seed = 0
    while len(hits) < 60:
        hits += at_the_best(seed)
        seed += 1
    assert sum(hits) >= 0.8 * len(hits)
