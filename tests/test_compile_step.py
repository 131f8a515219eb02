"""`compile_step`: one graph takes the steps of the plain loop, bit for bit, and says when it cannot."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph
from ampgraph._compat import VERSION
from ampgraph.errors import AmpGraphError, PolicyError
from ampgraph.step import trace_step

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 0, 1])
ONE = torch.ones(())


def net(dropout: float = 0.1, norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), norm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4))


def loss_fn(amp: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(amp(x), y) * weight


def uncompiled(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
    """A backend that compiles nothing, and counts as one that compiles."""
    return graph_module.forward


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == d], "weight_decay": d / 10} for d in (1, 2)
    ]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)


class Run:
    """A model with its optimizer and a schedule, that trains by one of two ways."""

    def __init__(
        self,
        level: str = "O2",
        dtype: torch.dtype = torch.float16,
        backend: str | Callable = "eager",
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.model = model or net()
        policy = ampgraph.Policy(level, dtype=dtype)  # type: ignore[arg-type]
        self.amp = ampgraph.convert(self.model, (X,), policy=policy, backend=backend)
        self.optimizer = make(self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.step = ampgraph.compile_step(self.amp, self.optimizer, loss_fn, **options)
        self.losses: list[float] = []

    def train(self, steps: int, whole: bool, bad: int = 9, clip_norm: float | None = None) -> Run:
        torch.manual_seed(1)
        if not whole:
            self.amp.scaler.attach(self.optimizer)
        for i in range(steps):
            weight = torch.tensor(1e38 if bad and i % bad == 4 else 1.0)
            loss = self.step(X + i / 50, Y, weight) if whole else self._plain(X + i / 50, weight, clip_norm)
            self.schedule.step()
            self.losses.append(loss.item())
        return self

    def _plain(self, x: Tensor, weight: Tensor, clip_norm: float | None) -> Tensor:
        loss = loss_fn(self.amp, x, Y, weight)
        loss.backward()
        if clip_norm is not None:
            self.amp.scaler.unscale_(self.optimizer)
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def assert_equal(whole: Run, plain: Run) -> None:
    assert whole.losses == plain.losses
    for (name, mine), theirs in zip(
        whole.model.state_dict().items(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    states = whole.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for mine, theirs in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert whole.amp.scaler.state_dict() == plain.amp.scaler.state_dict()
    assert whole.amp.scaler.last_overflow == plain.amp.scaler.last_overflow


@pytest.mark.parametrize(
    ("backend", "level", "make"),
    [("eager", "O1", sgd), ("eager", "O2", adamw), ("aot_eager", "O1", adamw), ("aot_eager", "O2", sgd)],
)
def test_a_hundred_steps_with_overflows_equal_the_loop(
    backend: str, level: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    # AOTAutograd computes batch norm and dropout by other kernels, which round elsewhere.
    models = [net() if backend == "eager" else net(0.0, nn.LayerNorm) for _ in range(2)]
    whole = Run(level, backend=backend, make=make, model=models[0]).train(100, whole=True)
    plain = Run(level, backend=backend, make=make, model=models[1]).train(100, whole=False)
    assert whole.step.reason is None
    assert len(whole.step.graph_modules) == 1
    assert whole.amp.scaler.last_overflow is not None
    assert_equal(whole, plain)


def test_clipping_and_bfloat16() -> None:
    for dtype, bad in ((torch.float16, 9), (torch.bfloat16, 0)):
        whole = Run(dtype=dtype, clip_norm=0.5).train(20, whole=True, bad=bad)
        plain = Run(dtype=dtype).train(20, whole=False, bad=bad, clip_norm=0.5)
        assert whole.step.reason is None
        assert_equal(whole, plain)


class Shifted(nn.Linear):
    """Its shifts have the same gradient."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 4)
        self.shifts = nn.ParameterList(torch.zeros(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.shifts[0] + self.shifts[1] + self.shifts[2])


class Recurrent(nn.Sequential):
    """Its kernel asks whether gradients are enabled."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.LSTM(8, 8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x[None])[0][0])


class Unread(nn.Linear):
    """Its batch norm writes running statistics, and nothing reads its result."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.norm(out)
        return out


class Checked(nn.Linear):
    """Refuses large arguments."""

    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async((x < 1e3).all(), "a large argument")
        return super().forward(x)


def test_checks_of_the_model_run_in_each_step() -> None:
    run = Run(dtype=torch.bfloat16, model=Checked()).train(4, whole=True, bad=0)
    assert run.step.reason is None
    with pytest.raises(RuntimeError, match="a large argument"):
        run.step(X * 1e6, Y, ONE)
    assert run.step.reason is None


OTHER_ROUNDING = (
    "torch 2.11 tells another dtype for the gradients of an LSTM's weights, which rounds once less"
)


@pytest.mark.parametrize(
    "model",
    [
        Shifted,
        pytest.param(Recurrent, marks=pytest.mark.skipif(VERSION < (2, 13), reason=OTHER_ROUNDING)),
        Unread,
    ],
)
def test_models_whose_ops_do_more_than_they_declare(model: Callable[[], nn.Module]) -> None:
    whole = Run(dtype=torch.bfloat16, model=model(), clip_norm=0.1).train(6, whole=True, bad=0)
    plain = Run(dtype=torch.bfloat16, model=model()).train(6, whole=False, bad=0, clip_norm=0.1)
    assert whole.step.reason is None
    assert_equal(whole, plain)


def test_a_compiled_graph_ends_with_the_gradients() -> None:
    seen: list[torch.fx.GraphModule] = []

    def compiler(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        seen.append(graph_module)
        return graph_module.forward

    whole = Run(backend=compiler, clip_norm=0.5).train(20, whole=True)
    plain = Run().train(20, whole=False, clip_norm=0.5)
    assert whole.step.reason is None
    assert "_fused_adamw_" not in whole.step.graph_modules[0].code
    assert len(seen) > 1
    # The check and clipping have no foreach norm, whose scalars a compiler copies one by one.
    assert "foreach" not in whole.step.graph_modules[0].code
    assert_equal(whole, plain)


def test_a_graph_for_a_compiler_that_fuses_updates_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_step, "FUSING", (uncompiled,))
    whole = Run(backend=uncompiled).train(40, whole=True)
    plain = Run().train(40, whole=False)
    assert whole.step.reason is None
    code = whole.step.graph_modules[0].code
    assert "_fused_adamw_" not in code
    assert "_local_scalar_dense" not in code  # the host would wait for the device
    assert whole.amp.scaler.state_dict() == plain.amp.scaler.state_dict()
    for mine, theirs in zip(whole.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert whole.optimizer.state[mine]["step"] == plain.optimizer.state[theirs]["step"]
    shadows = whole.amp._graphs.shadows
    assert shadows is not None
    assert all(torch.equal(low, weight.half()) for low, weight in shadows.pairs())


def test_settings_sizes_modes_and_loaded_states_between_steps() -> None:
    runs = [Run(), Run()]
    for run, is_whole in zip(runs, (True, False), strict=True):
        run.train(6, is_whole)
        saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        run.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        run.train(6, is_whole)
        run.amp.eval()
        run.train(6, is_whole)
        run.amp.train()
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
        run.train(6, is_whole)
        for parameter in run.model.parameters():
            parameter.data.mul_(0.5)
            parameter.data = parameter.data.clone()
        run.train(6, is_whole)
        run.model[0].requires_grad_(False)
        run.optimizer.zero_grad()
    assert_equal(*runs)
    assert len(runs[0].step.graph_modules) == 4


def test_numbers_that_the_loss_refers_to() -> None:
    factor, run = 1.0, Run(dtype=torch.bfloat16)
    step = ampgraph.compile_step(run.amp, run.optimizer, lambda amp, x: factor * amp(x).square().mean())
    run.amp.eval()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    first = [step(X) for _ in range(3)][-1]
    factor = 2.0
    assert torch.equal(step(X), 2 * first)
    assert [step(X), step.reason] == [2 * first, None]


def test_python_values_that_the_model_reads() -> None:
    class Scaled(nn.Module):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.factor

    run = Run(dtype=torch.bfloat16, make=sgd, model=Scaled())
    run.optimizer.param_groups[0]["lr"] = 0.0
    before = [run.step(X, Y, ONE) for _ in range(3)][-1]
    run.model.factor = 3.0
    after = [run.step(X, Y, ONE) for _ in range(3)]
    assert run.step.reason is None
    assert before != after[0]
    assert after[0] == after[1] == after[2]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_slices_of_one_tensor_are_of_one_kind(backend: str) -> None:
    whole, apart = (Run(backend=backend, model=net(0.0)) for _ in range(2))
    data = torch.randn(12 * 6 + 1, 8)
    for i in range(12):
        begin = 6 * i + i % 2
        losses = [
            run.step(x, Y, ONE)
            for run, x in ((whole, data[begin : begin + 6]), (apart, data[begin : begin + 6].clone()))
        ]
        assert torch.equal(*losses)
        assert (whole.step.reason is None) == (i > 1)
    assert len(whole.step.graph_modules) == 1
    assert_parameters_equal(whole.model, apart.model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_arguments_that_overlap_are_of_one_kind(backend: str) -> None:
    """As language models are trained: the targets are the inputs, one further."""
    whole, plain = (Run(dtype=torch.bfloat16, backend=backend, model=net(0.0)) for _ in range(2))
    data = torch.randn(12 * 6 + 1, 8)

    def loss_fn(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (amp(x) - y[:, :4]).square().mean()

    whole.step = ampgraph.compile_step(whole.amp, whole.optimizer, loss_fn)
    for i in range(12):
        x, y = data[6 * i : 6 * i + 6], data[6 * i + 1 : 6 * i + 7]
        loss = loss_fn(plain.amp, x, y)
        loss.backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        assert torch.equal(whole.step(x, y), loss)
        assert (whole.step.reason is None) == (i > 1)
    assert len(whole.step.graph_modules) == 1
    assert_parameters_equal(whole.model, plain.model)


def _compiler(graph_module: Any, inputs: list) -> Callable:
    forward: Callable = graph_module.forward
    return forward


@pytest.mark.parametrize("backend", ["eager", _compiler])
def test_arguments_that_overlap_and_are_written(backend: str | Callable) -> None:
    whole, plain = (Run(dtype=torch.bfloat16, backend=backend, model=net(0.0)) for _ in range(2))

    def loss_fn(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        return (amp(y) - x[:, :4]).square().mean()

    whole.step = ampgraph.compile_step(whole.amp, whole.optimizer, loss_fn)
    ours, theirs = (torch.arange(320.0).view(40, 8) / 320 for _ in range(2))
    for apart in (1, 1, 1, 2, 2, 2, 1, 8, 8, 8, 2):
        loss = loss_fn(plain.amp, theirs[:6], theirs[apart : apart + 6])
        loss.backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        assert torch.equal(whole.step(ours[:6], ours[apart : apart + 6]), loss)
        assert torch.equal(ours, theirs)
    if backend == "eager":
        assert whole.step.reason is None
    else:
        assert "shares memory with another one" in str(whole.step.reason)  # compilers get these wrong
    assert_parameters_equal(whole.model, plain.model)


def test_a_loss_that_asks_where_an_argument_begins() -> None:
    def shifted(amp: nn.Module, x: Tensor) -> Tensor:
        return amp(x.as_strided(x.shape, x.stride(), x.storage_offset() + 8)).float().square().mean()

    whole, plain = Run(dtype=torch.bfloat16, model=net(0.0)), Run(dtype=torch.bfloat16, model=net(0.0))
    whole.step = ampgraph.compile_step(whole.amp, whole.optimizer, shifted)
    data = torch.randn(30, 8)
    for begin in (0, 0, 0, 0, 6, 6, 6, 12, 0):
        x = data[begin : begin + 6]
        loss = shifted(plain.amp, x)
        loss.backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        assert torch.equal(whole.step(x), loss)
    assert whole.step.reason is None
    assert len(whole.step.graph_modules) == 2
    assert_parameters_equal(whole.model, plain.model)


def test_gradients_that_are_there_already_are_taken_too() -> None:
    runs = [Run("O1", model=net(0.0)) for _ in range(2)]
    for run in runs:
        run.train(3, whole=True, bad=0)
        loss_fn(run.amp, X, Y, ONE).backward()
    runs[0].step(X, Y, ONE)
    assert "gradients are there already" in str(runs[0].step.reason)
    loss_fn(runs[1].amp, X, Y, ONE).backward()
    runs[1].amp.scaler.step(runs[1].optimizer)
    assert_parameters_equal(*(run.model for run in runs))


def assert_parameters_equal(mine: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_other_models_of_the_same_weights_see_the_steps() -> None:
    run = Run(dtype=torch.bfloat16)
    other = ampgraph.convert(run.model, (X,), policy="O2", dtype=torch.bfloat16)
    run.train(3, whole=True, bad=0)
    run.amp.eval()
    other(X)
    run.amp.train()
    run.train(3, whole=True, bad=0)
    run.amp.eval()
    fresh = ampgraph.convert(copy.deepcopy(run.model), (X,), policy="O2", dtype=torch.bfloat16)
    assert torch.equal(other(X), fresh(X))
    assert torch.equal(run.amp(X), fresh(X))


def unfused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_an_optimizer_that_is_not_fused_runs_the_loop_and_says_so() -> None:
    whole = Run(make=unfused)
    with pytest.warns(UserWarning, match=r"plain loop: AdamW is not fused; .* fused=True"):
        whole.train(20, whole=True)
    assert "not fused" in str(whole.step.reason)
    assert_equal(whole, Run(make=unfused).train(20, whole=False))


def just_in_time(run: Run) -> None:
    run.amp = ampgraph.convert(run.model, dtype=torch.float16)
    run.step = ampgraph.compile_step(run.amp, run.optimizer, loss_fn)


def parameter_hook(run: Run) -> None:
    run.model[0].weight.register_hook(lambda g: g)


def fewer_parameters(run: Run) -> None:
    run.step = ampgraph.compile_step(run.amp, sgd(run.model[0]), loss_fn)


def prints_a_number(run: Run) -> None:
    def loss(amp: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return loss_fn(amp, x, y, weight) * float(amp(x).detach().max())

    run.step = ampgraph.compile_step(run.amp, run.optimizer, loss)


REASONS = {
    just_in_time: "captured just in time",
    parameter_hook: "a parameter has hooks",
    fewer_parameters: "does not hold exactly",
    prints_a_number: "loss_fn reads the value of a tensor",
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_what_no_graph_can_do_is_said_once(change: Callable[[Run], None]) -> None:
    run = Run("O1")
    change(run)
    with pytest.warns(UserWarning, match=REASONS[change]):
        losses = [run.step(X, Y, ONE) for _ in range(3)]
    assert REASONS[change] in str(run.step.reason)
    assert all(loss.isfinite() for loss in losses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(X, Y, ONE)


def test_wrong_arguments_are_refused() -> None:
    run = Run("O1")
    with pytest.raises(AmpGraphError, match="got a Sequential"):
        ampgraph.compile_step(run.model, run.optimizer, loss_fn)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="expected an optimizer; got a int"):
        ampgraph.compile_step(run.amp, 3, loss_fn)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"the AdamW holds none of the 6 parameters of the Sequential"):
        ampgraph.compile_step(run.amp, adamw(net()), loss_fn)
    with pytest.raises(PolicyError, match="expected a function"):
        ampgraph.compile_step(run.amp, run.optimizer, None)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="positive number"):
        ampgraph.compile_step(run.amp, run.optimizer, loss_fn, clip_norm=-1)
    step = ampgraph.compile_step(run.amp, run.optimizer, lambda amp, x: amp(x))
    with pytest.raises(PolicyError, match=r"shape \(6, 4\)"):
        step(X)


def _backward_inside(amp: nn.Module, x: Tensor) -> Tensor:
    loss = amp(x).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda amp: amp(X).sum(), "with the arguments of the step: too many"),
        (lambda amp, x, y: amp(x).sum(), "with the arguments of the step: missing a required argument: 'y'"),
        (lambda amp, x: amp(x).sum().detach(), "has no gradient"),
        (lambda amp, x: (amp(x) > 0).sum(), "has no gradient"),
        (lambda amp, x: amp(x).sum() * 1j, r"shape \(\) and dtype torch.complex64; .* of one real number"),
        (_backward_inside, "without calling backward"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(wrong: Callable, message: str) -> None:
    run = Run("O1")
    before = [p.detach().clone() for p in run.amp.parameters()]
    step = ampgraph.compile_step(run.amp, run.optimizer, wrong)
    with pytest.raises(PolicyError, match=message):
        step(X)
    assert all(map(torch.equal, before, run.amp.parameters()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_where_gradients_are_off_is_refused(mode: Callable) -> None:
    run = Run("O1").train(4, whole=True)
    is_told = pytest.warns(UserWarning, match="under torch.no_grad or torch.inference_mode")
    is_refused = pytest.raises(PolicyError, match=r"is called under torch\.no_grad\(\) or")
    with mode(), is_told, is_refused:
        run.step(X, Y, ONE)
    run.train(1, whole=True)
    assert run.step.reason is None


def test_a_type_error_inside_a_loss_is_its_own() -> None:
    run = Run("O1")
    step = ampgraph.compile_step(run.amp, run.optimizer, lambda amp, x: len(amp(x).sum() + 1) + None)
    with pytest.raises(TypeError, match="0-d tensor"):
        step(X)


def damped(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.5, fused=fused)


def test_first_steps_that_overflow_leave_no_momentum() -> None:
    def trained(whole: bool, fused: bool) -> Run:
        run = Run(make=lambda model: damped(model, fused), model=net(0.0))
        if not whole:
            run.amp.scaler.attach(run.optimizer)
        for i in range(8):
            weight = torch.tensor(1e38 if i in (0, 1, 6) else 1.0)
            run.losses.append((run.step(X, Y, weight) if whole else run._plain(X, weight, None)).item())
            if i < 2:
                assert not any("momentum_buffer" in held for held in run.optimizer.state.values())
        return run

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the graph waits for the state, without a warning
        whole = trained(whole=True, fused=True)
    assert whole.step.reason is None
    assert_equal(whole, trained(whole=False, fused=True))
    for mine, theirs in zip(whole.model.parameters(), trained(False, False).model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_graph_for_a_compiler_waits_for_momentum() -> None:
    run = Run(make=damped, backend=uncompiled, model=net(0.0))
    for _ in range(2):
        run.step(X, Y, torch.tensor(1e38))
    assert run.step.reason == "the optimizer creates state in this step"
    for _ in range(4):
        run.step(X, Y, ONE)
    assert run.step.reason is None


class Decaying(torch.optim.Adam):
    """Adds to the fused step, which the kernel cannot leave out."""

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.9)
        return result


def loaded(model: nn.Module) -> torch.optim.Optimizer:
    """Returns a fused optimizer with the settings of one that is not."""
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    return optimizer


@pytest.mark.parametrize("make", [lambda model: Decaying(model.parameters(), fused=True), loaded])
def test_steps_that_no_kernel_leaves_out_are_left_out(make: Callable[[nn.Module], Any]) -> None:
    run = Run(make=make, model=net(0.0))
    for weight, is_bad in ((ONE, False), (torch.tensor(1e38), True)):
        before = copy.deepcopy(run.model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.step(X, Y, weight)
        assert torch.equal(before["0.weight"], run.model[0].weight) == is_bad


def test_a_step_that_is_replaced_in_the_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = torch.optim.SGD.step

    @functools.wraps(original)
    def step(self: torch.optim.SGD, closure: Callable | None = None) -> Any:
        calls.append(self)
        return original(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    run = Run(make=sgd)
    with pytest.warns(UserWarning, match="the step of this SGD is replaced"):
        run.train(4, whole=True, bad=0)
    assert len(calls) == 4


def test_settings_that_no_step_reads_and_tensors_inside_settings() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        betas = torch.tensor(0.9), torch.tensor(0.99)
        rate = torch.tensor(1e-2)
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, fused=True, capturable=True)

    runs = [Run(make=make), Run(make=make)]
    for run, is_whole in zip(runs, (True, False), strict=True):
        for i in range(4):
            run.optimizer.param_groups[0]["round"] = i
            run.train(2, is_whole)
        assert len(run.step.graph_modules) == is_whole
        run.optimizer.param_groups[0]["betas"][0].fill_(0.5)
        run.train(6, is_whole)
    assert runs[0].step.reason is None
    assert_equal(*runs)


def test_a_schedule_that_changes_other_settings_is_named() -> None:
    run = Run()
    schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=40)
    for _ in range(7):
        run.step(X, Y, ONE)
        schedule.step()
    with pytest.warns(UserWarning, match=r"keep betas of the optimizer constant .*cycle_momentum=False"):
        run.step(X, Y, ONE)


class Shared(nn.Module):
    """A weight that one mode reads as it is and another casts, and an average of it, as MoCo has one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 4) / 4)
        self.average = nn.Parameter(self.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor, casts: bool = False) -> Tensor:
        h = self.first(x)
        if casts:
            return h @ self.weight + h @ self.average
        with torch.no_grad():
            self.average.mul_(0.5).add_(self.weight, alpha=0.5)
        return (h.float()[:, :, None] * self.weight.exp()).log_softmax(1).sum(1) + h @ self.average


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", [True, False])
def test_low_copies_that_only_another_graph_reads(backend: str, first: bool) -> None:
    runs = [Run(dtype=torch.bfloat16, backend=backend, model=Shared()) for _ in range(2)]
    outputs: list[list[Tensor]] = [[], []]
    for run, is_whole, found in zip(runs, (True, False), outputs, strict=True):
        if first:
            run.amp(X, casts=True).detach()
        for _ in range(4):
            run.train(3, is_whole, bad=0)
            with torch.no_grad():
                found.append(run.amp(X, casts=True))
    assert runs[0].step.reason is None
    assert all(map(torch.equal, *outputs))
    assert_equal(*runs)


def test_low_copies_that_were_replaced() -> None:
    runs = [Run(dtype=torch.bfloat16, make=sgd, model=nn.Sequential(net()[0])) for _ in range(2)]
    for run, is_whole in zip(runs, (True, False), strict=True):
        run.train(4, is_whole, bad=0)
        weight, held = run.model[0].weight, run.model[0].weight.data
        weight.data = torch.zeros(16, 9)  # as a move to another device and back
        with torch.no_grad():
            run.amp(torch.ones(6, 9))
        weight.data = held / 2
        run.train(4, is_whole, bad=0)
    assert runs[0].step.reason is None
    assert_equal(*runs)


class Interrupt(TorchDispatchMode):
    """Interrupts before an op."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if self.op in str(func):
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_an_interrupted_step_leaves_no_old_low_copies() -> None:
    run = Run(dtype=torch.bfloat16, model=net(0.0, nn.LayerNorm)).train(6, whole=True, bad=0)
    before = run.model[4].weight.detach().clone()  # a state dict makes the step refresh all copies first
    with pytest.raises(KeyboardInterrupt), Interrupt("_foreach_copy_"):
        run.step(X, Y, ONE)
    assert not torch.equal(before, run.model[4].weight)
    with torch.no_grad():
        found = run.amp(X)  # before a copy of the model, which reads ``.data``
        fresh = ampgraph.convert(copy.deepcopy(run.model), (X,), policy="O2", dtype=torch.bfloat16)
        assert torch.equal(found, fresh(X))


def test_a_step_that_the_backend_does_not_compile_runs_the_loop() -> None:
    def compiler(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        if "log_softmax" in graph_module.code:  # the step, not the model
            raise ValueError("no code\n\nOutput:\n/tmp/x.cpp:3:1: error: conflicting name")
        return graph_module.forward

    whole = Run(backend=compiler)
    with pytest.warns(
        UserWarning,
        match=r"compiling fails with BackendCompilerFailed: .*ValueError: no code: conflicting name\.",
    ):
        whole.train(20, whole=True)
    assert_equal(whole, Run(backend=compiler).train(20, whole=False))


class Branches(nn.Module):
    """Both biases have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_a_graph_for_a_compiler_has_each_sum_once() -> None:
    graphs = []

    def compiler(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        graphs.append(graph_module)
        return graph_module.forward

    amp = ampgraph.convert(Branches(), (X,), policy="O1", dtype=torch.bfloat16, backend=compiler)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda amp, x: amp(x).square().mean())
    for _ in range(3):
        step(X)
    assert step.reason is None
    assert graphs[-1].code.count("aten.sum") == 1
    assert amp.a.bias.data_ptr() != amp.b.bias.data_ptr()


@pytest.mark.parametrize("part", [lambda x: x * 2, lambda x: (x * 2).view(-1), lambda x: (x * 2)[0]])
def test_equal_results_are_separate_tensors(part: Callable) -> None:
    amp = ampgraph.convert(Branches(), (X,), policy="O1", dtype=torch.bfloat16, backend=uncompiled)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, fused=True)
    step = ampgraph.compile_step(
        amp, optimizer, lambda amp, x: (amp(x).square().mean(), x * 2, part(x), amp(x).exp(), amp(x).exp())
    )
    for _ in range(3):
        results = step(X)
        expected = [result.clone() for result in results]
        for result in results:
            result.add_(1)
        for result, before in zip(results, expected, strict=True):
            assert torch.equal(result, before + 1)
    assert step.reason is None


def test_a_generator_of_the_loss_is_for_the_loop_on_a_compiler() -> None:
    generator = torch.Generator().manual_seed(0)
    run = Run(backend=uncompiled)
    run.step = ampgraph.compile_step(
        run.amp,
        run.optimizer,
        lambda amp, x, y, weight: loss_fn(amp, x + torch.rand(8, generator=generator), y, weight),
    )
    with pytest.warns(UserWarning, match=r"draws from a torch.Generator"):
        run.train(4, whole=True, bad=0)


class Heads(nn.Module):
    """Two heads on one trunk.

    Returns their results, one of them twice, the trunk's, and the input; if asked, views of a parameter and
    of a result too.
    """

    def __init__(self, has_views: bool) -> None:
        super().__init__()
        self.has_views = has_views
        torch.manual_seed(0)
        self.trunk, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.trunk(x).relu()
        first, second = self.first(hidden), self.second(hidden)
        views = [self.first.weight.t(), second[0]] if self.has_views else []
        return {"first": first, "again": first, "second": second, "hidden": hidden, "x": x, "views": views}


@pytest.mark.parametrize("has_views", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_outputs_that_the_loss_leaves_out(backend: str, dtype: torch.dtype, has_views: bool) -> None:
    """A compiled backward gives zeros to the parameters behind them, and the optimizer decays these."""
    policy = ampgraph.Policy(dtype=dtype)

    def loss_of_one(amp: nn.Module, x: Tensor, name: str) -> Tensor:
        picked = amp(x)[name]
        picked += 1
        return picked.square().mean()

    models = []
    for whole in (False, True):
        model = Heads(has_views)
        amp = ampgraph.convert(model, (X,), policy=policy, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5, fused=True)
        step = ampgraph.compile_step(amp, optimizer, loss_of_one)
        amp.scaler.attach(optimizer)
        for i in range(12):
            name = ["first", "second", "hidden"][i // 2 % 3]
            if whole:
                step(X + i, name)
                continue
            loss_of_one(amp, X + i, name).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model.state_dict())
        assert not whole or step.reason is None
    for name, plain in models[0].items():
        assert torch.equal(plain, models[1][name]), name


@pytest.mark.parametrize(("backend", "is_refused"), [("eager", False), ("aot_eager", True)])
def test_results_that_share_memory_beside_an_unused_parameter(backend: str, is_refused: bool) -> None:
    model = Heads(has_views=True)
    model.unused = nn.Linear(2, 2)
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda amp, x: amp(x)["views"][0].square().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            step(X)
    assert is_refused == ("share memory" in (step.reason or ""))


def test_results_that_are_no_tensors() -> None:
    def with_numbers(amp: nn.Module, x: Tensor, name: str) -> tuple:
        y = amp(x)
        return y.square().mean(), None, {"rows": len(x), "y": y, "name": name, "size": y.shape}

    runs = [Run(dtype=torch.bfloat16, model=net(0.0, nn.LayerNorm)) for _ in range(2)]
    step = ampgraph.compile_step(runs[0].amp, runs[0].optimizer, with_numbers)
    for rows in (6, 6, 6, 4, 4, 4):
        loss, nothing, rest = step(X[:rows], f"of {rows}")
        wanted, _, others = with_numbers(runs[1].amp, X[:rows], f"of {rows}")
        wanted.backward()
        runs[1].optimizer.step()
        runs[1].optimizer.zero_grad()
        assert nothing is None
        assert (rest["rows"], rest["name"]) == (rows, f"of {rows}")
        assert (type(rest["size"]), rest["size"]) == (torch.Size, others["size"])
        assert torch.equal(loss, wanted)
        assert torch.equal(rest["y"], others["y"])
    assert step.reason is None


def test_a_result_that_a_graph_cannot_keep_runs_the_loop() -> None:
    run = Run(model=net(0.0, nn.LayerNorm))
    step = ampgraph.compile_step(run.amp, run.optimizer, lambda amp, x: (amp(x).square().mean(), object()))
    with pytest.warns(UserWarning, match=r"loss_fn returns a value of the type object"):
        results = [step(X)[1] for _ in range(4)]
    assert {*map(type, results)} == {object}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="no Muon in this torch")
def test_an_optimizer_of_torch_that_has_no_fused_form() -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    step = ampgraph.compile_step(amp, torch.optim.Muon(amp.parameters()), lambda amp, x: amp(x).mean())
    with pytest.warns(UserWarning, match="Muon is not fused"):
        step(X)


def test_gradients_of_parameters_that_the_optimizer_does_not_hold_are_cleared() -> None:
    def part(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model[0].parameters(), lr=1e-2, fused=True)  # type: ignore[index]

    whole, plain = Run(make=part), Run(make=part)
    plain.optimizer.register_step_post_hook(lambda *_: plain.model.zero_grad())
    for steps in (12, 6):
        whole.train(steps, whole=True)
        plain.train(steps, whole=False)
        assert all(parameter.grad is None for parameter in whole.model.parameters())
        for run in (whole, plain):  # later steps train the rest, too
            if len(run.optimizer.param_groups) == 1:
                run.optimizer.add_param_group({"params": [*run.model[1:].parameters()]})  # type: ignore[index]
    assert whole.step.reason is None
    assert_equal(whole, plain)


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_cannot_be_copied(copied: Callable, has_graph: bool) -> None:
    run = Run()
    if has_graph:
        run.train(3, whole=True)
    assert len(run.step.graph_modules) == has_graph
    with pytest.raises(AmpGraphError, match="a compiled step cannot be copied or pickled"):
        copied(run.step)
