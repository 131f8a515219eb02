"""What torch's tests of ``torch.amp.GradScaler`` ask for: the same loop runs with either scaler.

Where ours differs, docs/migrating.md has a line: `test_differences_are_written_down`.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy, PolicyError, StaticLossScale

pytestmark = pytest.mark.usefixtures("shared_captures")
INF = float("inf")
NUMBERS = {"init_scale": 128.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 1}


def source() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def pair(enabled: bool = True, backend: str = "eager") -> Iterator[tuple[nn.Module, Any]]:
    """Yields torch's scaler with a plain model, then ours with its own."""
    model = source()
    yield model, torch.amp.GradScaler("cpu", **NUMBERS, enabled=enabled)
    scale = DynamicLossScale(**NUMBERS) if enabled else NoLossScale()
    policy = Policy(dtype=torch.float16, loss_scale=scale)
    amp = ampgraph.convert(source(), (torch.randn(8, 8),), policy=policy, backend=backend)
    yield amp, amp.scaler


DATA = torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(2))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return (model(DATA[step % len(DATA)]) - 1).square().mean()


def close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.002)


def _optimizers() -> dict[str, Callable]:
    """Every optimizer of torch.optim that steps without a closure and with dense gradients, fused too."""
    apart = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
    made: dict[str, Callable] = {}
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or name in apart:
            continue
        made[name] = lambda p, kind=kind: kind(p, lr=0.01)
        if name in ("SGD", "Adam", "AdamW"):
            made[f"{name}-fused"] = lambda p, kind=kind: kind(p, lr=0.01, fused=True)
            made[f"{name}-foreach"] = lambda p, kind=kind: kind(p, lr=0.01, foreach=True)
    made["Muon"] = lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01)
    return made


OPTIMIZERS = _optimizers()


# -- which hold --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_skips_and_adapts_with_every_optimizer(name) -> None:
    """One step's gradient is infinite: it is left out, and the scale follows torch's to the bit."""
    found = []
    for model, scaler in pair():
        optimizer = OPTIMIZERS[name](model.parameters())
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            scaler.scale(loss_of(model, step)).backward()
            if step == 2:
                model.get_parameter("1.weight").grad.fill_(INF)
            scaler.step(optimizer)
            scaler.update()
            changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            scales.append((scaler.get_scale(), changed))
        assert [changed for _, changed in scales] == [True, True, False, True, True]
        found.append((model, scales))
    assert found[0][1] == found[1][1]
    for parameter in found[1][0].parameters():
        assert parameter.isfinite().all()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_clipping(unscale, backend) -> None:
    found = []
    for model, scaler in pair(backend=backend):
        is_torchs = isinstance(scaler, torch.amp.GradScaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if unscale or is_torchs:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        found.append((model, scaler.get_scale()))
    close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_what_is_done_after_unscale_does_not_count() -> None:
    for model, scaler in pair():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(loss_of(model, 0)).backward()
        model.get_parameter("0.weight").grad.fill_(INF)
        scaler.unscale_(optimizer)
        optimizer.zero_grad(set_to_none=False)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == before * NUMBERS["backoff_factor"]


def test_accumulation() -> None:
    models = []
    for model, scaler in pair():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            scaler.scale(loss_of(model, step) / 2).backward()
            if step % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        models.append((model, scaler.state_dict()))
    close(models[0][0], models[1][0])
    assert models[0][1].items() <= models[1][1].items()


def test_two_models_two_optimizers_one_scaler() -> None:
    found = []
    for kind in range(2):
        (one, scaler), (other, _) = (list(pair())[kind] for _ in range(2))
        optimizers = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ours tells that the second is another model's
            for step in range(4):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                first, second = loss_of(one, step), loss_of(other, step)
                scaler.scale(first + 2 * second).backward(retain_graph=True)
                scaler.scale(first - 0.5 * second).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
        found.append((one, other, scaler.get_scale()))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


def test_gradient_penalty() -> None:
    models = []
    for model, scaler in pair():
        is_torchs = isinstance(scaler, torch.amp.GradScaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            inverse = 1 / scaler.get_scale() if is_torchs else 1.0  # the line of docs/migrating.md
            norm = sum((g * inverse).square().sum() for g in gradients).sqrt()
            scaler.scale(loss + norm).backward()
            scaler.step(optimizer)
            scaler.update()
        models.append(model)
    close(*models)


def test_scale_takes_what_torchs_takes() -> None:
    for _, scaler in pair(enabled=False):
        outputs = [torch.ones(2), (torch.ones(1), [torch.ones(3)])]
        assert scaler.scale(outputs) is outputs


def test_sparse_gradients() -> None:
    for bad in (False, True):
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
        ids = torch.tensor([1, 3, 1])
        policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(**NUMBERS))
        amp = ampgraph.convert(model, (ids,), policy=policy)
        optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
        before = [p.detach().clone() for p in amp.parameters()]
        (amp(ids).sum() * (INF if bad else 1)).backward()
        assert model[0].weight.grad.is_sparse
        amp.scaler.step(optimizer)
        changed = [not torch.equal(a, b) for a, b in zip(before, amp.parameters(), strict=True)]
        assert changed == [not bad] * 3


def test_numbers_are_read_and_changed() -> None:
    for _, scaler in pair():
        assert scaler.is_enabled()
        assert scaler.get_growth_factor() == NUMBERS["growth_factor"]
        assert scaler.get_backoff_factor() == NUMBERS["backoff_factor"]
        assert scaler.get_growth_interval() == NUMBERS["growth_interval"]
        scaler.set_growth_factor(3.0)
        scaler.set_backoff_factor(0.1)
        scaler.set_growth_interval(7)
        state = scaler.state_dict()
        assert (state["growth_factor"], state["backoff_factor"], state["growth_interval"]) == (3.0, 0.1, 7)


def test_every_public_name_of_torchs_is_there() -> None:
    *_, (_, ours) = pair()
    public = [name for name in dir(torch.amp.GradScaler) if not name.startswith("_")]
    assert "set_growth_interval" in public
    assert [name for name in public if not callable(getattr(ours, name, None))] == []


def test_order_of_calls_is_checked() -> None:
    for model, scaler in pair():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(loss_of(model, 0)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_.* already"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step.* already"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_.* after step"):
            scaler.unscale_(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)


def test_a_new_scale_by_hand() -> None:
    for model, scaler in pair():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for new in (16.0, torch.tensor(8.0)):
            scaler.scale(loss_of(model, 0)).backward()
            scaler.step(optimizer)
            scaler.update(new)
            assert scaler.get_scale() == float(new)


def test_a_disabled_one_is_not_in_the_way() -> None:
    for model, scaler in pair(enabled=False):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.get_parameter("0.weight").detach().clone()
        scaler.scale(loss_of(model, 0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not scaler.is_enabled()
        assert scaler.get_scale() == 1.0
        assert scaler.state_dict() == {}
        assert not torch.equal(before, model.get_parameter("0.weight"))


def test_an_empty_state_is_refused() -> None:
    for _, scaler in pair():
        with pytest.raises((RuntimeError, PolicyError), match="empty"):
            scaler.load_state_dict({})


# -- which differ ------------------------------------------------------------------------------------


def test_closures_are_taken() -> None:
    for model, scaler in pair():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = scaler.scale(loss_of(model, 0))
        loss.backward()
        if isinstance(scaler, torch.amp.GradScaler):
            with pytest.raises(RuntimeError, match="Closure"):
                scaler.step(optimizer, closure=lambda loss=loss: loss)
        else:
            assert scaler.step(optimizer, closure=lambda loss=loss: loss) is loss


def test_a_step_without_gradients() -> None:
    for model, scaler in pair():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if isinstance(scaler, torch.amp.GradScaler):
            scaler.scale(torch.ones(1))
            with pytest.raises(AssertionError, match="No inf checks"):
                scaler.step(optimizer)
            with pytest.raises(AssertionError, match="No inf checks"):
                scaler.update()
        else:
            scaler.step(optimizer)
            scaler.update()
            assert scaler.state_dict()["_growth_tracker"] == 0


def test_a_copy_says_that_it_is_not_connected() -> None:
    *_, (amp, scaler) = pair()
    others = copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))
    assert all(other.state_dict() == scaler.state_dict() for other in others)
    for other in others:
        optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
        loss_of(amp, 0).backward()
        with pytest.warns(UserWarning, match="this scaler is a copy"):
            other.step(optimizer)
    both = copy.deepcopy(nn.ModuleList([amp]))
    loss_of(both[0], 0).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both[0].scaler.step(torch.optim.SGD(both.parameters(), lr=0.1))


def test_differences_are_written_down() -> None:
    text = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()
    for name in ("closure", "gradient penalty", "No inf checks", "A copy", "enabled=False", "LBFGS"):
        assert name in text, name


# -- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: DynamicLossScale(init_scale=1e39, ceiling=1e39),
        lambda: DynamicLossScale(floor=1e-50),
        lambda: DynamicLossScale(ceiling=1e38, init_scale=1e38),
        lambda: DynamicLossScale(growth_factor=1.0),
        lambda: DynamicLossScale(growth_factor=1.0 + 1e-9),
        lambda: DynamicLossScale(growth_factor=1e39),
        lambda: DynamicLossScale(backoff_factor=1.0),
        lambda: DynamicLossScale(backoff_factor=1e-50),
        lambda: DynamicLossScale(growth_interval=2**31),
        lambda: StaticLossScale(1e39),
        lambda: StaticLossScale(1e-39),
    ],
)
def test_numbers_are_those_of_float32(make) -> None:
    with pytest.raises(PolicyError):
        make()


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": float("nan")},
        {"scale": INF},
        {"scale": 1e39},
        {"scale": -1.0},
        {"scale": "big"},
        {"growth_factor": float("nan")},
        {"backoff_factor": 2.0},
        {"growth_interval": 0},
        {"_growth_tracker": -1},
        {"_growth_tracker": 0.5},
    ],
)
def test_a_wrong_state_changes_nothing(wrong) -> None:
    *_, (_, scaler) = pair()
    before = scaler.state_dict()
    with pytest.raises(PolicyError):
        scaler.load_state_dict({**before, "scale": 2.0, **wrong})
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "new", [0.0, -1.0, INF, float("nan"), 1e39, "big", torch.tensor([1.0, 2.0]), torch.tensor(3)]
)
def test_a_wrong_new_scale_changes_nothing(new) -> None:
    *_, (_, scaler) = pair()
    with pytest.raises(PolicyError, match="update"):
        scaler.update(new)
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_a_wrong_number_changes_nothing(name) -> None:
    *_, (_, scaler) = pair()
    with pytest.raises(PolicyError):
        getattr(scaler, f"set_{name}")(-1)
    assert getattr(scaler, f"get_{name}")() == NUMBERS[name]


def test_a_fixed_scale_has_no_growth() -> None:
    scale = StaticLossScale(8.0)
    amp = ampgraph.convert(nn.Linear(2, 2), policy=Policy(dtype=torch.float16, loss_scale=scale))
    with pytest.raises(PolicyError, match="StaticLossScale neither grows nor backs off"):
        amp.scaler.get_growth_factor()
