"""Steps with non-finite gradients are skipped, in every kind of loop, and reported."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy, StaticLossScale

from .models import ReluNet, TwoHeads

pytestmark = pytest.mark.usefixtures("shared_captures")
FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))


def convert(model: nn.Module | None = None, policy: Policy = FLOAT16) -> ampgraph.AmpModule:
    return ampgraph.convert(model or ReluNet(), (torch.randn(4, 8),), policy=policy)


def batch(bad: float | None = None) -> torch.Tensor:
    x = torch.randn(4, 8)
    if bad is not None:
        x[0, 0] = bad
    return x


def backward(amp: nn.Module, optimizer: torch.optim.Optimizer, bad: float | None = None) -> torch.Tensor:
    optimizer.zero_grad()
    loss = amp(batch(bad)).square().mean()
    loss.backward()
    return loss


def everything(amp: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and all tensors of the optimizers' states: momenta, step counters, buffers."""
    values = [v for o in optimizers for state in o.state.values() for v in state.values()]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*amp.parameters(), *amp.buffers(), *tensors)]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "fused-sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused-adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("style", ["attach", "step"])
def test_bad_step_changes_nothing(kind, bad, style) -> None:
    amp = convert()
    optimizer = OPTIMIZERS[kind](amp.parameters())
    if style == "attach":
        amp.scaler.attach(optimizer)

    def step() -> None:
        if style == "attach":
            optimizer.step()
        else:
            amp.scaler.step(optimizer)
            amp.scaler.update()

    backward(amp, optimizer)
    step()
    before = everything(amp, optimizer)
    backward(amp, optimizer, bad)
    step()
    assert same(before, everything(amp, optimizer))
    assert amp.scaler.get_scale() == 512.0
    assert amp.scaler.last_overflow.step == 2
    backward(amp, optimizer)
    step()
    assert not same(before, everything(amp, optimizer))
    assert amp.scaler.get_scale() == 512.0


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_fused_gives_what_the_others_give(kind) -> None:
    results = []
    for name in (kind, f"fused-{kind}"):
        torch.manual_seed(0)
        amp = convert()
        optimizer = OPTIMIZERS[name](amp.parameters())
        amp.scaler.attach(optimizer)
        for step in range(12):
            backward(amp, optimizer, float("inf") if step % 4 == 1 else None)
            optimizer.step()
        results.append((everything(amp), amp.scaler.state_dict()))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(one, other)
    assert results[0][1] == results[1][1]


def test_overflow_names_the_parameters(caplog) -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    for _ in range(2):
        backward(amp, optimizer)
        optimizer.step()
    assert amp.scaler.last_overflow is None
    # The gradient of the second weight alone is infinite: its input is, and relu's gradient is not.
    with caplog.at_level(logging.WARNING, logger="ampgraph"):
        optimizer.zero_grad()
        (amp(batch()) * torch.tensor([1e9, 0.0, 0.0, 0.0])).sum().backward()
        optimizer.step()
    found = amp.scaler.last_overflow
    assert found.step == 3
    assert found.scale == 1024.0
    assert found.parameters[0].startswith("second.")
    assert set(found.parameters) <= {n for n, _ in amp.named_parameters()}
    assert "non-finite gradients" in caplog.text
    assert "second." in caplog.text


def test_one_parameter_is_named_alone() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.good(x), self.bad(y)

    amp = ampgraph.convert(Apart(), (batch(), batch()), policy=FLOAT16)
    optimizer = torch.optim.AdamW(amp.parameters(), fused=True)
    amp.scaler.attach(optimizer)
    good, bad = amp(batch(), batch(float("nan")))
    (good.sum() + bad.sum()).backward()
    optimizer.step()
    assert amp.scaler.last_overflow.parameters == ("bad.weight",)


def test_bad_parameter_value_skips() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, momentum=0.9)
    amp.scaler.attach(optimizer)
    backward(amp, optimizer)
    optimizer.step()
    with torch.no_grad():
        amp.second.weight[0, 0] = float("inf")
    before = everything(amp, optimizer)
    backward(amp, optimizer)
    optimizer.step()
    assert same(before, everything(amp, optimizer))


def test_static_scale_may_step_on_overflow() -> None:
    config = StaticLossScale(64.0, skip_on_overflow=False)
    amp = convert(policy=Policy(dtype=torch.float16, loss_scale=config))
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    backward(amp, optimizer, float("inf"))
    optimizer.step()
    assert not all(p.isfinite().all() for p in amp.parameters())
    assert amp.scaler.last_overflow.step == 1
    assert amp.scaler.get_scale() == 64.0


def test_static_scale_skips_and_stays() -> None:
    amp = convert(policy=Policy(dtype=torch.float16, loss_scale=StaticLossScale(64.0)))
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = everything(amp)
    backward(amp, optimizer, float("inf"))
    optimizer.step()
    assert same(before, everything(amp))
    assert amp.scaler.get_scale() == 64.0


# -- loops -------------------------------------------------------------------------------------------


def test_attach_twice_counts_once() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    assert amp.scaler.attach(optimizer).attach(optimizer, optimizer) is amp.scaler
    backward(amp, optimizer, float("inf"))
    optimizer.step()
    assert amp.scaler.get_scale() == 512.0


@pytest.mark.parametrize("first", ["scheduler", "attach"])
@pytest.mark.parametrize("kind", ["sgd", "fused-adamw"])
def test_learning_rate_scheduler(first, kind) -> None:
    amp = convert()
    optimizer = OPTIMIZERS[kind](amp.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if first == "attach":
            amp.scaler.attach(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if first == "scheduler":
            amp.scaler.attach(optimizer)
        rate = scheduler.get_last_lr()[0]
        before = everything(amp)
        backward(amp, optimizer, float("inf"))
        optimizer.step()
        scheduler.step()
        assert same(before, everything(amp))
        backward(amp, optimizer)
        optimizer.step()
        scheduler.step()
    assert not same(before, everything(amp))
    assert scheduler.get_last_lr()[0] == pytest.approx(rate / 100)


@pytest.mark.parametrize("kind", ["sgd", "fused-adamw"])
def test_closure(kind) -> None:
    amp = convert()
    optimizer = OPTIMIZERS[kind](amp.parameters())
    amp.scaler.attach(optimizer)
    calls = []

    def closure(bad: float | None = None) -> torch.Tensor:
        calls.append(bad)
        return backward(amp, optimizer, bad)

    before = everything(amp)
    optimizer.step(lambda: closure(float("inf")))
    assert same(before, everything(amp))
    assert amp.scaler.get_scale() == 512.0
    loss = optimizer.step(closure)
    assert loss.isfinite()
    assert not same(before, everything(amp))
    optimizer.step(closure=closure)
    assert calls == [float("inf"), None, None]


def test_optimizer_that_calls_its_closure_often() -> None:
    amp = convert()
    optimizer = torch.optim.LBFGS(amp.parameters(), lr=0.1, max_iter=4)
    amp.scaler.attach(optimizer)
    x = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = amp(x).square().mean()
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(3):
        optimizer.step(closure)
    assert closure().item() < first
    before = everything(amp)
    x[0, 0] = float("inf")
    optimizer.step(closure)
    assert same(before, everything(amp))


def test_two_optimizers_one_overflow() -> None:
    amp = ampgraph.convert(TwoHeads(), (batch(), batch()), policy=FLOAT16)
    a = torch.optim.SGD(amp.a.parameters(), lr=0.1)
    b = torch.optim.AdamW(amp.b.parameters(), fused=True)
    amp.scaler.attach(a, b)
    before_a, before_b = everything(amp.a), everything(amp.b)
    one, two = amp(batch(), batch(float("inf")))
    (one.sum() + two.sum()).backward()
    a.step()
    b.step()
    assert not same(before_a, everything(amp.a))
    assert same(before_b, everything(amp.b))
    assert amp.scaler.get_scale() == 512.0
    assert amp.scaler.last_overflow.parameters == ("b.weight",)
    # One that rests does not keep the scale from adapting.
    for _ in range(4):
        a.zero_grad()
        amp(batch(float("inf")), batch())[0].sum().backward()
        a.step()
    assert amp.scaler.get_scale() < 512.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_one_optimizer_over_two_models(fused, bad) -> None:
    models = convert(), convert()
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], fused=fused)
    for model in models:
        model.scaler.attach(optimizer)

    def step(bad: int | None) -> None:
        optimizer.zero_grad()
        for i, model in enumerate(models):
            model(batch(float("inf") if i == bad else None)).sum().backward()
        optimizer.step()

    before = [everything(m) for m in models]
    step(bad)
    assert all(same(b, everything(m)) for b, m in zip(before, models, strict=True))
    assert [m.scaler.get_scale() for m in models] == [512.0 if i == bad else 1024.0 for i in range(2)]
    step(None)
    assert not any(same(b, everything(m)) for b, m in zip(before, models, strict=True))


def test_gradients_that_never_saw_backward_are_checked() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = everything(amp)
    loss = amp(batch(float("nan"))).sum()
    for p, g in zip(amp.parameters(), torch.autograd.grad(loss, list(amp.parameters())), strict=True):
        p.grad = g
    optimizer.step()
    assert same(before, everything(amp))
    optimizer.zero_grad()
    amp(batch(float("nan"))).sum().backward(inputs=list(amp.parameters()))
    optimizer.step()
    assert same(before, everything(amp))
    assert amp.scaler.last_overflow.step == 2


def test_accumulation_keeps_an_early_overflow() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = everything(amp)
    for bad in (float("inf"), None, None):
        amp(batch(bad)).sum().backward()
    optimizer.step()
    assert same(before, everything(amp))


# -- the reminder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_loop_past_the_scaler_is_told_once(just_in_time, fused) -> None:
    amp = ampgraph.convert(ReluNet(), policy=FLOAT16) if just_in_time else convert()
    amp.first.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in amp.parameters() if p.requires_grad], fused=fused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            backward(amp, optimizer)
            optimizer.step()
    assert len([w for w in caught if "amp.scaler.attach(optimizer)" in str(w.message)]) == 1


@pytest.mark.parametrize("style", ["attach", "step", "no step"])
def test_right_loop_is_told_nothing(style) -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if style == "attach":
            amp.scaler.attach(optimizer)
        for _ in range(4):
            backward(amp, optimizer)
            if style == "attach":
                optimizer.step()
            elif style == "step":
                amp.scaler.step(optimizer)
                amp.scaler.update()


# -- what it is for ----------------------------------------------------------------------------------


def test_unscaled_float16_stalls_and_scaled_follows_float32() -> None:
    source = ReluNet()
    data = torch.randn(32, 8)
    target = torch.sin(data[:, :4])

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            # A small loss, as with a large batch or an averaged sequence.
            loss = (model(data) - target).square().mean() * 1e-7
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * 1e7)
        return losses[0], losses[-1]

    def make(policy: Policy | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(source)
        amp = model if policy is None else ampgraph.convert(model, (data,), policy=policy)
        optimizer = torch.optim.SGD(amp.parameters(), lr=3e6)
        if policy is not None:
            amp.scaler.attach(optimizer)
        return amp, optimizer

    start, float32 = train(*make(None))
    _, scaled = train(*make(Policy(dtype=torch.float16)))
    _, unscaled = train(*make(Policy(dtype=torch.float16, loss_scale=NoLossScale())))
    assert float32 < 0.5 * start
    assert scaled == pytest.approx(float32, rel=0.02)
    assert unscaled > 0.9 * start


def test_attach_takes_optimizers_only():
    amp = ampgraph.convert(nn.Linear(4, 4), (torch.ones(1, 4),), dtype=torch.float16)
    with pytest.raises(ampgraph.PolicyError, match="attach takes optimizers, got str"):
        amp.scaler.attach("adam")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_the_methods_of_the_loop_take_an_optimizer(dtype, method) -> None:
    amp = ampgraph.convert(nn.Linear(4, 4), (torch.ones(1, 4),), dtype=dtype)
    for value, name in ((None, "NoneType"), (amp, "AmpModule")):
        with pytest.raises(ampgraph.PolicyError, match=f"{method} takes an optimizer, got {name}"):
            getattr(amp.scaler, method)(value)


def test_attach_without_a_scale_tells_nothing() -> None:
    amp = ampgraph.convert(nn.Linear(4, 4), (torch.ones(1, 4),), dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.scaler.attach(torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1))


@pytest.mark.parametrize("steps", [False, True])
def test_gradients_are_saved_and_loaded_without_code_of_ours(steps: bool, tmp_path: Path) -> None:
    amp = ampgraph.convert(nn.Linear(4, 4), (torch.ones(1, 4),), dtype=torch.float16)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in amp.parameters()]
    amp.scaler.attach(*optimizers)
    amp(torch.ones(1, 4)).sum().backward()
    for optimizer in optimizers if steps else ():
        optimizer.step()
    torch.save([p.grad for p in amp.parameters()], tmp_path / "gradients.pt")
    for parameter, loaded in zip(amp.parameters(), torch.load(tmp_path / "gradients.pt"), strict=True):
        assert torch.equal(parameter.grad, loaded)


def test_attach_tells_of_an_optimizer_of_another_model():
    amp = ampgraph.convert(nn.Linear(4, 4), (torch.ones(1, 4),), dtype=torch.float16)
    other = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="none of the 2 parameters of this SGD belongs to this model"):
        amp.scaler.attach(torch.optim.SGD(other.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.scaler.attach(torch.optim.SGD([*other.parameters(), *amp.parameters()], lr=0.1))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_one_scaler_steps_an_optimizer_of_each_model(count, unscale, reverse) -> None:
    models = [convert() for _ in range(count)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    scaler, order = models[0].scaler, list(reversed(optimizers)) if reverse else optimizers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                backward(model, optimizer, float("inf") if i == 1 else None)
            for optimizer in order if unscale else ():
                scaler.unscale_(optimizer)
            for optimizer in order:
                scaler.step(optimizer)
            scaler.update()
    assert [m.scaler.get_scale() for m in models] == [128.0 if i == 1 else 1024.0 for i in range(count)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_joint_optimizer_and_one_of_a_single_model(reverse) -> None:
    models = convert(), convert()
    joint = torch.optim.SGD([*models[0].first.parameters(), *models[1].parameters()], lr=0.1)
    single = torch.optim.SGD(models[0].second.parameters(), lr=0.1)
    for _ in range(2):
        backward(models[0], single)
        backward(models[1], joint, float("inf"))
        for optimizer in (single, joint) if reverse else (joint, single):
            models[0].scaler.step(optimizer)
        models[0].scaler.update()
    assert [m.scaler.get_scale() for m in models] == [1024.0, 256.0]


def test_models_that_share_a_parameter_both_adapt() -> None:
    first, second = ReluNet(), ReluNet()
    second.second = first.second
    models, head = (convert(first), convert(second)), convert()
    optimizer = torch.optim.SGD([*head.parameters(), *first.parameters(), *second.first.parameters()], lr=0.1)
    head.scaler.attach(optimizer)
    backward(models[1], optimizer, float("inf"))
    optimizer.step()
    assert [m.scaler.get_scale() for m in (head, *models)] == [1024.0, 512.0, 512.0]


def test_a_step_left_out_after_unscale_backs_off() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    for scale, bad in ((512.0, float("inf")), (256.0, float("nan")), (256.0, None)):
        backward(amp, optimizer, bad)
        amp.scaler.unscale_(optimizer)
        if torch.nn.utils.clip_grad_norm_(amp.parameters(), 1.0).isfinite():
            amp.scaler.step(optimizer)
        amp.scaler.update()
        assert amp.scaler.get_scale() == scale
    assert amp.scaler.last_overflow.step == 2


@pytest.mark.parametrize("args", [(torch.zeros(4, 8),), None], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize("fused", [False, True])
def test_overflow_of_the_forward_is_told_as_such(args, fused, caplog) -> None:
    """Not as one of the gradients, whose last parameter says nothing."""
    amp = ampgraph.convert(ReluNet(), args, policy=FLOAT16, backend="eager")
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, fused=fused)
    amp.scaler.attach(optimizer)
    with caplog.at_level(logging.WARNING, logger="ampgraph"):
        for scale in (1.0, 1e6):  # 1e6 does not fit into float16
            optimizer.zero_grad()
            amp(batch() * scale).sum().backward()
            optimizer.step()
        found = amp.scaler.last_overflow
    assert (found.step, found.in_forward) == (2, True)
    assert "outputs are not finite" in caplog.text
    assert "check_numerics" in caplog.text
    assert "first in" not in caplog.text


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_least_scale_is_told_with_advice(scale: float, caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=scale))
    amp = ampgraph.convert(ReluNet(), (torch.zeros(4, 8),), policy=policy, backend="eager")
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    with caplog.at_level(logging.WARNING, logger="ampgraph"):
        (amp(batch()).sum() * torch.inf).backward()
        optimizer.step()
    assert f"gradients at loss scale {scale:g}" in caplog.text
    assert ("check_numerics" in caplog.text) == (scale == 1.0)


def test_overflow_of_the_gradient_is_not_told_as_one_of_the_forward() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, fused=True)
    amp.scaler.attach(optimizer)
    for factor, bad in ((1e9, None), (1.0, float("inf")), (1.0, None)):
        optimizer.zero_grad()
        (amp(batch(bad)) * factor).sum().backward()
        optimizer.step()
    # The outputs of later calls say nothing of the step.
    assert amp.scaler.last_overflow.step == 2
    assert amp.scaler.last_overflow.in_forward
    optimizer.zero_grad()
    (amp(batch()) * 1e9).sum().backward()
    optimizer.step()
    assert amp.scaler.last_overflow.step == 4
    assert not amp.scaler.last_overflow.in_forward


@pytest.mark.parametrize("inside", ["conversion", "loop", "step of one graph"])
@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_a_default_device_is_not_that_of_internal_tensors(inside, default) -> None:
    def on(place: str) -> contextlib.AbstractContextManager:
        return torch.device(default) if place == inside else contextlib.nullcontext()

    model, x = ReluNet(), batch()
    with on("conversion"):
        loss_scale = DynamicLossScale(init_scale=1024.0)
        policy = Policy(dtype=torch.float16, loss_scale=loss_scale)
        amp = ampgraph.convert(model, (x,), policy=policy)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=1e-2, fused=True)
    amp.scaler.attach(optimizer)
    step = ampgraph.compile_step(amp, optimizer, lambda model, x: model(x).square().mean())
    batches = [batch(bad) for bad in (None, None, float("inf"), None)]
    for x in batches[:1]:  # makes the optimizer's state, which is torch's
        optimizer.zero_grad()
        amp(x).square().mean().backward()
        optimizer.step()
    with on(inside):
        for x in batches[1:]:
            if inside == "step of one graph":
                step(x)
                continue
            optimizer.zero_grad()
            amp(x).square().mean().backward()
            amp.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(amp.parameters(), 1.0)
            optimizer.step()
        amp.scaler.load_state_dict(amp.scaler.state_dict())
    assert amp.scaler.get_scale() == 512.0
    assert amp.scaler.last_overflow.step == 3
