"""The loss scale: its configuration, its trajectory against torch's GradScaler, its state."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy, PolicyError, StaticLossScale
from ampgraph.policy.loss_scale import adapted, adapted_by_kernel, first_counters
from ampgraph.training.gradient_boundary import scale_gradients, unscale_gradients
from ampgraph.training.scaler import LossScaler

pytestmark = pytest.mark.usefixtures("shared_captures")
BAD_STEPS = {2, 3, 7, 11, 12, 13, 20}
STEPS = 24


def scaler_for(config: object) -> LossScaler:
    model = nn.Linear(2, 2)
    scaler = LossScaler(config, model, torch.device("cpu"))
    scaler.model = model  # which the scaler itself does not keep parameters of
    return scaler


def play(scaler: LossScaler, steps: str) -> list[float]:
    """Feeds good (.) and bad (x) steps; returns the scale after each."""
    parameters = [p for p, _ in scaler.guard.slots.items()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    scales = []
    for step in steps:
        for p in parameters:
            p.grad = torch.full_like(p, float("inf") if step == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


# -- configuration -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaticLossScale(0.0),
        lambda: StaticLossScale(float("inf")),
        lambda: StaticLossScale("big"),
        lambda: StaticLossScale(1.0, skip_on_overflow="no"),
        lambda: DynamicLossScale(init_scale=-1.0),
        lambda: DynamicLossScale(init_scale=float("nan")),
        lambda: DynamicLossScale(growth_factor=0.5),
        lambda: DynamicLossScale(backoff_factor=2.0),
        lambda: DynamicLossScale(growth_interval=0),
        lambda: DynamicLossScale(growth_interval=2.5),
        lambda: DynamicLossScale(hysteresis=1.5),
        lambda: DynamicLossScale(bad_steps_before_backoff=True),
        lambda: DynamicLossScale(floor=4.0, init_scale=2.0),
        lambda: DynamicLossScale(ceiling=2.0, init_scale=4.0),
        lambda: Policy(loss_scale=1024.0),
    ],
)
def test_config_is_validated(make) -> None:
    with pytest.raises(PolicyError):
        make()


@pytest.mark.parametrize(
    "config", [NoLossScale(), StaticLossScale(8.0, False), DynamicLossScale(64.0, hysteresis=3)]
)
def test_policy_repr_round_trips(config) -> None:
    policy = Policy(dtype=torch.float16, loss_scale=config)
    names = {**vars(ampgraph), "torch": torch}
    assert eval(repr(policy), names) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_default_is_by_dtype() -> None:
    def enabled(**given) -> bool:
        return ampgraph.convert(nn.Linear(2, 2), **given).scaler.is_enabled()

    assert enabled(dtype=torch.float16)
    assert not enabled(dtype=torch.bfloat16)
    assert not enabled(dtype=torch.float16, policy="O0")
    assert not enabled(policy=Policy(dtype=torch.float16, loss_scale=NoLossScale()))
    assert enabled(policy=Policy(dtype=torch.bfloat16, loss_scale=StaticLossScale(8.0)))


def test_whole_number_scale_is_a_float() -> None:
    for config in (StaticLossScale(1024), DynamicLossScale(init_scale=1024)):
        state = scaler_for(config).state
        assert state.scale.dtype == state.inverse.dtype == torch.float32


def test_no_loss_scale_is_a_no_op() -> None:
    amp = ampgraph.convert(nn.Linear(2, 2), (torch.randn(1, 2),), dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    plain = optimizer.step
    amp.scaler.attach(optimizer)
    assert optimizer.step == plain
    before = amp.weight.detach().clone()
    amp(torch.randn(1, 2)).sum().backward()
    amp.scaler.step(optimizer)
    amp.scaler.update()
    assert not torch.equal(before, amp.weight)
    assert amp.scaler.get_scale() == 1.0
    assert amp.scaler.state_dict() == {}
    assert amp.scaler.last_overflow is None
    functions = {node.target for node in amp.training_graph.graph.nodes}
    assert not functions & {scale_gradients, unscale_gradients}


# -- trajectory --------------------------------------------------------------------------------------


class Cast(nn.Module):
    """The casts that convert makes in ``nn.Linear``, by hand."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.linear.weight.half(), self.linear.bias.half()
        return nn.functional.linear(x.half(), weight, bias).float()


def run(model: nn.Module, scaler, optimizer: torch.optim.Optimizer, steps: range) -> list[tuple]:
    """One loop for both scalers; returns scale, growth tracker and whether the step was skipped."""
    trajectory = []
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        if step in BAD_STEPS:
            x[0, 0] = float("inf")
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        trajectory.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"], skipped))
    return trajectory


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "fused"])
def test_trajectory_is_that_of_grad_scaler(kind) -> None:
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    }[kind]
    source = nn.Linear(8, 4)
    reference = Cast(copy.deepcopy(source))
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    config = DynamicLossScale(init_scale=1024.0, growth_interval=3)
    policy = Policy(dtype=torch.float16, loss_scale=config)
    amp = ampgraph.convert(source, (torch.randn(4, 8),), policy=policy)
    expected = run(reference, theirs, make(reference.parameters()), range(STEPS))
    assert run(amp, amp.scaler, make(amp.parameters()), range(STEPS)) == expected
    assert {i for i, (_, _, skipped) in enumerate(expected) if skipped} == BAD_STEPS
    for ours, other in zip(amp.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, other)


@given(
    start=st.floats(1.0, 2.0**24, width=32),
    growth=st.floats(1.0009765625, 8.0, width=32),
    backoff=st.floats(0.0009765625, 0.9990234375, width=32),
    interval=st.integers(1, 3),
    steps=st.lists(st.booleans(), min_size=1, max_size=12),
)
@example(start=110000.0, growth=1.1, backoff=0.3, interval=2, steps=[True, False, False, True])
def test_both_rules_are_grad_scalers_to_the_bit(start, growth, backoff, interval, steps) -> None:
    config = DynamicLossScale(start, growth, backoff, interval)
    theirs = torch.tensor([start]), torch.zeros(1, dtype=torch.int32)
    ours = {
        rule: (torch.tensor(start), torch.tensor(first_counters(config), dtype=torch.int32))
        for rule in (adapted, adapted_by_kernel)
    }
    for is_bad in steps:
        found = torch.tensor(float(is_bad))
        torch._amp_update_scale_(*theirs, found, growth, backoff, interval)
        theirs[0].clamp_(config.floor, config.ceiling)
        for rule, (scale, counters) in ours.items():
            before = scale.clone(), counters.clone()
            ours[rule] = new, good = rule(config, scale, counters, found)
            assert (new, good[0]) == (theirs[0], theirs[1]), rule
            assert new.dtype == torch.float32
            assert good.dtype == torch.int32
            assert scale == before[0]
            assert torch.equal(counters, before[1])


def test_more_good_steps_than_the_interval() -> None:
    """A state of a run with a longer interval; torch's kernel would wait for equality for ever."""
    scaler = scaler_for(DynamicLossScale(64.0, growth_interval=100))
    scaler.load_state_dict({"scale": 64.0, "_growth_tracker": 650, "growth_interval": 100})
    assert play(scaler, "..") == [128.0, 128.0]
    scaler.load_state_dict({"scale": 64.0, "_growth_tracker": 50, "growth_interval": 100})
    scaler.set_growth_interval(10)
    assert play(scaler, ".") == [128.0]


def test_200_bad_steps_stop_at_the_floor_and_good_ones_at_the_ceiling() -> None:
    scaler = scaler_for(DynamicLossScale(floor=0.5, ceiling=64.0, init_scale=32.0, growth_interval=1))
    assert min(play(scaler, "x" * 200)) == play(scaler, "x")[0] == 0.5
    assert max(play(scaler, "." * 200)) == 64.0


def test_hysteresis_ignores_backoffs_since_the_last_growth() -> None:
    scaler = scaler_for(DynamicLossScale(8.0, growth_interval=2, hysteresis=2))
    assert play(scaler, "x") == [8.0]  # one is ignored
    assert play(scaler, ".xx") == [8.0, 4.0, 2.0]  # good steps alone do not bring patience back
    assert play(scaler, "..xx") == [2.0, 4.0, 4.0, 2.0]  # growth does


def test_bad_steps_in_a_row_count_as_one() -> None:
    scaler = scaler_for(DynamicLossScale(8.0, bad_steps_before_backoff=2))
    assert play(scaler, "x.xxx.xx") == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0, 2.0]


def test_update_takes_a_new_scale_within_bounds() -> None:
    scaler = scaler_for(DynamicLossScale(ceiling=128.0, init_scale=64.0))
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor(8.0))
    assert scaler.get_scale() == 8.0
    scaler.update(1e9)
    assert scaler.get_scale() == 128.0
    assert float(scaler.state.inverse) == 1 / 128


# -- state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, [1024.0], "scale"])
def test_a_state_is_a_dict(state) -> None:
    scaler = ampgraph.convert(nn.Linear(4, 4), (torch.ones(1, 4),), dtype=torch.float16).scaler
    with pytest.raises(PolicyError, match=f"load_state_dict takes the dict .*, got {type(state).__name__}"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("groups", ["x", 3, ("x",), [None]])
def test_process_groups_are_none_or_groups(groups) -> None:
    scaler = ampgraph.convert(nn.Linear(4, 4), (torch.ones(1, 4),), dtype=torch.float16).scaler
    with pytest.raises(PolicyError, match=r"scaler\.process_groups is None \(all ranks\).*, got"):
        scaler.process_groups = groups
    assert scaler.process_groups is None
    scaler.process_groups = ()
    assert scaler.process_groups == ()


def test_state_has_grad_scalers_keys_and_takes_its_state() -> None:
    theirs = torch.amp.GradScaler("cpu", 128.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    theirs.load_state_dict({**theirs.state_dict(), "_growth_tracker": 5})
    scaler = scaler_for(DynamicLossScale())
    assert theirs.state_dict().keys() <= scaler.state_dict().keys()
    scaler.load_state_dict(theirs.state_dict())
    mine = scaler.state_dict()
    assert {k: mine[k] for k in theirs.state_dict()} == theirs.state_dict()
    theirs.load_state_dict(mine)


def test_a_dead_scale_of_grad_scaler_comes_back_at_the_floor() -> None:
    scaler = scaler_for(DynamicLossScale())
    scaler.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": 0.0})
    assert scaler.get_scale() == 1.0


def used_scaler() -> tuple[nn.Module, LossScaler]:
    config = DynamicLossScale(64.0, 4.0, 0.25, 5, 2.0, 256.0, 3, 2)
    policy = Policy(dtype=torch.float16, loss_scale=config)
    amp = ampgraph.convert(nn.Linear(2, 2), (torch.randn(1, 2),), policy=policy)
    play(amp.scaler, "....." + "xxx" + "..")
    return amp, amp.scaler


def test_every_field_round_trips() -> None:
    _, scaler = used_scaler()
    state = pickle.loads(pickle.dumps(scaler.state_dict()))
    other = scaler_for(DynamicLossScale())
    other.load_state_dict(state)
    assert other.state_dict() == scaler.state_dict()
    assert other.config == scaler.config
    assert other.last_overflow == scaler.last_overflow is not None
    assert play(other, "xx....") == play(scaler, "xx....")
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == state


def test_deepcopy_and_pickle_keep_the_scaler() -> None:
    amp, scaler = used_scaler()
    for other in (copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))):
        assert other.scaler is not scaler
        assert other.scaler.state_dict() == scaler.state_dict()
        other(torch.randn(1, 2)).sum().backward()
        assert other.scaler.state.flags is not None
        assert scaler.state.flags is None


def test_resumed_run_is_bitwise_the_same() -> None:
    config = DynamicLossScale(init_scale=1024.0, growth_interval=3, hysteresis=2)
    policy = Policy(dtype=torch.float16, loss_scale=config)

    def fresh() -> tuple:
        torch.manual_seed(0)
        amp = ampgraph.convert(nn.Linear(8, 4), (torch.randn(4, 8),), policy=policy)
        return amp, torch.optim.AdamW(amp.parameters(), lr=1e-2)

    whole, optimizer = fresh()
    first = run(whole, whole.scaler, optimizer, range(12))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), whole.scaler.state_dict()))
    rest = run(whole, whole.scaler, optimizer, range(12, STEPS))
    resumed, optimizer = fresh()
    for part, state in zip((resumed, optimizer, resumed.scaler), saved, strict=True):
        part.load_state_dict(state)
    assert run(resumed, resumed.scaler, optimizer, range(12, STEPS)) == rest
    assert first
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()
    for ours, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_a_gradient_of_one_is_too_large_for_the_first_scale() -> None:
    """Outside a training loop nothing lowers it."""
    x = torch.randn(2, 4, requires_grad=True)
    model = nn.Linear(4, 4)

    def gradient(**options: object) -> torch.Tensor:
        amp = ampgraph.convert(model, (x,), policy=Policy(dtype=torch.float16, **options))  # type: ignore[arg-type]
        return torch.autograd.grad(amp(x).sum(), x)[0]

    assert not gradient().isfinite().any()
    expected = model.weight.sum(0).expand(2, 4)
    torch.testing.assert_close(gradient(loss_scale=NoLossScale()), expected, rtol=0.01, atol=0.01)


def test_a_float16_output_does_not_go_with_a_loss_scale() -> None:
    policy = Policy(dtype=torch.float16, keep_io_dtypes=False)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for args in ((x,), None):
        with pytest.raises(ampgraph.PolicyError, match=r"convert: keep_io_dtypes=False .* underflow"):
            ampgraph.convert(model, args, policy=policy)
    for legal in (policy.replace(loss_scale=NoLossScale()), policy.replace(dtype=torch.bfloat16)):
        assert ampgraph.convert(model, (x,), policy=legal)(x).dtype == legal.dtype


@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_source_that_returns_float16_is_told_that_its_gradients_underflow(backend, just_in_time) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).half()

    x = torch.randn(2, 4)
    args = None if just_in_time else (x,)
    amp = ampgraph.convert(Half(), args, policy=Policy(dtype=torch.float16), backend=backend)
    with torch.no_grad():
        amp(x)
    with pytest.warns(UserWarning, match="returns a float16 tensor") as told:
        amp(x).float().sum().backward()
    assert told[0].filename == __file__
