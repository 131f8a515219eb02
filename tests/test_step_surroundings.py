"""`compile_step` beside the plain loop: what changes between steps, outside of the arguments."""

from __future__ import annotations

import copy
import functools
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampgraph

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 0, 1])
FACTOR = 1.0
SETTINGS = {"factor": 1.0, "deep": [SimpleNamespace(power=1.0)]}

pytestmark = pytest.mark.filterwarnings("ignore:ampgraph.compile_step runs the plain loop")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4))


def uncompiled(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
    """A backend that compiles nothing, and counts as one that compiles."""
    return graph_module.forward


@torch.fx.wrap
def doubled(x: Tensor) -> Tensor:
    return 2 * x


class Run:
    """A model that trains by a compiled step, or by the plain loop; ``reasons`` has those of all steps."""

    def __init__(
        self,
        is_whole: bool,
        loss_of: Callable[[Run], Callable],
        model: nn.Module,
        backend: str | Callable = "eager",
    ) -> None:
        self.model, self.is_whole = model, is_whole
        self.amp = ampgraph.convert(model, (X,), policy="O2", dtype=torch.float16, backend=backend)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        self.loss_fn = loss_of(self)
        self.step = ampgraph.compile_step(self.amp, self.optimizer, self.loss_fn)
        self.losses: list[float] = []
        self.reasons: list[str | None] = []
        if not is_whole:
            self.amp.scaler.attach(self.optimizer)
        torch.manual_seed(1)

    def train(self, steps: int = 3) -> None:
        for i in range(steps):
            self.take(X + i / 50, Y)

    def take(self, *args: Any) -> None:
        if self.is_whole:
            loss = self.step(*args)
            self.reasons.append(self.step.reason)
        else:
            loss = self.loss_fn(self.amp, *args)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())


def plain_loss(run: Run) -> Callable:
    return lambda amp, x, y: F.cross_entropy(amp(x), y)


def both(
    change: Callable[[Run], object],
    loss_of: Callable[[Run], Callable] = plain_loss,
    model: Callable[[], nn.Module] = layer,
    backend: str | Callable = "eager",
) -> Run:
    """Runs ``change`` on a compiled step and on the loop; returns the former if both trained alike."""
    runs = []
    for is_whole in (True, False):
        run = Run(is_whole, loss_of, model(), backend)
        change(run)
        runs.append(run)
    whole, plain = runs
    assert whole.losses == plain.losses
    for mine, theirs in zip(
        whole.model.state_dict().values(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    return whole


# -- changes of the model and the optimizer ------------------------------------------------------------------


def another_activation(run: Run) -> None:
    run.model[1] = nn.ReLU()


def a_hook(run: Run) -> None:
    run.model[0].register_forward_hook(lambda module, args, out: out * 2)


def an_edited_graph(run: Run) -> None:
    graph_module = run.amp.graph_module
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
        node.target, node.kwargs = torch.ops.aten.relu.default, {}
    graph_module.recompile()


def other_strides(run: Run) -> None:
    weight = run.model[0].weight
    weight.data = weight.data.t().contiguous().t()


def frozen(run: Run) -> None:
    run.model[0].requires_grad_(False)


def other_strides_in_place(run: Run) -> None:
    weight = run.model[0].weight
    with torch.no_grad():
        weight.set_(weight.detach().t().clone().contiguous())
        weight.t_()


def a_tensor_as_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


CHANGES = (
    a_tensor_as_rate,
    other_strides_in_place,
    other_strides,
    an_edited_graph,
    another_activation,
    a_hook,
    frozen,
)


def test_changes_of_model_and_optimizer_between_steps() -> None:
    def story(run: Run) -> None:
        run.train()
        for change in CHANGES:
            change(run)
            run.train()

    assert both(story, model=net).reasons[2::3] == [None] * (1 + len(CHANGES))


def test_gradients_have_the_strides_of_their_parameters() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Conv2d(2, 4, 2, padding=1), nn.Linear(36, 4)
            self.to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.view(6, 2, 2, 2)).relu().flatten(1))

    assert both(lambda run: run.train(6), model=Conv).reasons[-1] is None


def data_of_other_sizes(run: Run, values: Tensor) -> None:
    run.model.factor.data = values


def other_sizes_in_place(run: Run, values: Tensor) -> None:
    run.model.factor.resize_(values.shape).copy_(values)


@pytest.mark.parametrize("change", [data_of_other_sizes, other_sizes_in_place])
def test_a_buffer_that_gets_other_sizes(change: Callable[[Run, Tensor], None]) -> None:
    """No dict of the model changes, and the gradient of the parameter beside it is a sum now."""

    class Scaled(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*layer())
            self.shift = nn.Parameter(torch.ones(4))
            self.register_buffer("factor", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift * self.factor

    def story(run: Run) -> None:
        run.train(5)
        change(run, X[:, :4].clone())
        run.train(6)

    assert both(story, model=Scaled).reasons[-1] is None


def test_what_replaces_steps_and_forwards_runs() -> None:
    run = Run(True, plain_loss, layer())
    run.train()
    calls: list[int] = []
    original = run.optimizer.step
    run.optimizer.step = lambda *args: (calls.append(1), original(*args))  # type: ignore[assignment]
    run.train(2)
    assert (len(calls), run.reasons[-1]) == (2, "the step of this AdamW is replaced")
    del run.optimizer.step
    run.amp.scaler.attach(run.optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    run.train()
    schedule.step()
    assert run.reasons[-1] is None
    with ampgraph.watch(run.amp):
        run.train(1)
    assert "as ampgraph.watch does" in str(run.reasons[-1])
    with register_optimizer_step_pre_hook(lambda *args: calls.append(1)):
        run.train(2)
    assert (len(calls), run.reasons[-1]) == (4, "AdamW has hooks")
    is_told = pytest.warns(UserWarning, match="hooks for all modules")
    with is_told, nn.modules.module.register_module_forward_hook(lambda *args: calls.append(1)):
        run.train(1)
    assert len(calls) > 4
    assert "hooks for all modules" in str(run.reasons[-1])


def test_functions_that_symbolic_traces_keep_whole() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: Tensor) -> Tensor:
            return doubled(self.layer(x))

    assert both(lambda run: run.train(4), model=Doubled).reasons[-2:] == [None, None]


def test_a_step_copies_the_weights_once() -> None:
    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten._foreach_copy_.default
            return func(*args, **(kwargs or {}))

    run = Run(True, plain_loss, layer())
    run.train(4)
    with Copies() as copies:
        run.train(2)
    assert run.reasons[-1] is None
    assert copies.count == 2


def test_parameters_that_replaced_others() -> None:
    """The model casts them; the old ones live on, with their low copies."""

    def story(run: Any) -> None:
        run.train()
        run.old = [*run.model.parameters()]
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(state, assign=True)
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, fused=True)
        run.amp.scaler.attach(run.optimizer)
        run.step = ampgraph.compile_step(run.amp, run.optimizer, run.loss_fn)
        run.train(6)

    assert both(story, model=net).reasons[-2:] == [None, None]


# -- what the loss does to the parameters --------------------------------------------------------------------


def other_parameters(amp: nn.Module, x: Tensor) -> Tensor:
    """As MAML does."""
    named = dict(amp.named_parameters())
    loss = functional_call(amp, named, (x,)).square().mean()
    grads = torch.autograd.grad(loss, [*named.values()])
    moved = {name: p - 0.1 * g for (name, p), g in zip(named.items(), grads, strict=True)}
    return functional_call(amp, moved, (x,))


def one_other_parameter(amp: Any, x: Tensor) -> Tensor:
    return functional_call(amp, {"2.bias": torch.ones(4)}, (x,)) + amp(x)


def clamped(amp: Any, x: Tensor) -> Tensor:
    amp[0].weight.data.clamp_(-0.2, 0.2)
    return amp(x)


def normalized(amp: Any, x: Tensor) -> Tensor:
    before = amp(x).detach()
    with torch.no_grad():
        torch._foreach_mul_([amp[0].weight[:4], amp[2].bias], 0.9)
    return amp(x) - before


def under_autocast(amp: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return amp(x) @ torch.ones(4, 4)


@pytest.mark.parametrize(
    "outputs", [other_parameters, one_other_parameter, clamped, normalized, under_autocast]
)
def test_losses_that_call_the_model_with_other_values(outputs: Callable) -> None:
    def loss_of(run: Run) -> Callable:
        return lambda amp, x, y: F.cross_entropy(outputs(amp, x), y)

    assert both(lambda run: run.train(5), loss_of, net).reasons[-2:] == [None, None]


# -- changes of what the loss reads --------------------------------------------------------------------------


def scaled(loss: Tensor) -> Tensor:
    return loss * FACTOR


class Trainer:
    """A trainer whose method is the loss."""

    alpha = 1.0

    def __init__(self) -> None:
        self.beta, self.steps, self.config = 1.0, 0, SimpleNamespace(inner=SimpleNamespace(gamma=1.0))

    def factor(self) -> float:
        return self.alpha * self.beta * self.config.inner.gamma * getattr(self, "late", 1.0)

    def loss(self, amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(amp(x), y) * self.factor()


class Loss(nn.Module):
    """A loss with a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.inner = 1.0, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(amp(x), y) * self.factor


def test_python_values_that_the_loss_reads_from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(run: Run) -> Callable:
        weights = [1.0, 2.0]
        run.weights = weights  # type: ignore[attr-defined]

        def loss(amp: nn.Module, x: Tensor, y: Tensor, *, power: dict[str, float]) -> Tensor:
            losses = [F.cross_entropy(amp(x), y) * w * power["by"] for w in weights]
            inner: Any = SETTINGS["deep"]
            return scaled(sum(losses) * SETTINGS["factor"] * inner[0].power)  # type: ignore[arg-type]

        run.power = {"by": 1.0}  # type: ignore[attr-defined]
        return functools.partial(loss, power=run.power)  # type: ignore[attr-defined]

    def story(run: Any) -> None:
        with monkeypatch.context() as patched:
            run.train()
            patched.setitem(globals(), "FACTOR", 3.0)
            run.train()
            patched.setitem(SETTINGS, "factor", 0.5)
            run.train()
            patched.setattr(SETTINGS["deep"][0], "power", 0.25)  # type: ignore[index]
            run.train()
            run.weights[0] = 5.0
            run.train()
            run.power["by"] = 0.1
            run.train()

    whole = both(story, loss_of)
    assert whole.reasons[2::3] == [None] * 6
    assert "other Python values now" in str(whole.reasons[3])


def test_attributes_of_the_object_whose_method_is_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(run: Any) -> Callable:
        run.trainer = Trainer()
        return run.trainer.loss

    def story(run: Any) -> None:
        trainer = run.trainer
        with monkeypatch.context() as patched:
            for change in (
                lambda: None,
                lambda: setattr(trainer, "beta", 2.0),
                lambda: patched.setattr(Trainer, "alpha", 3.0),
                lambda: setattr(trainer.config.inner, "gamma", 0.5),
                lambda: setattr(trainer, "late", 2.0),
            ):
                change()
                for _ in range(3):
                    run.train(1)
                    trainer.steps += 1  # the loss does not read it

    assert both(story, loss_of).reasons[2::3] == [None] * 5


def test_settings_tensors_and_parts_of_a_loss_module() -> None:
    def story(run: Any) -> None:
        loss = run.loss_fn
        for change in (
            lambda: None,
            lambda: setattr(loss, "factor", 2.0),
            lambda: setattr(loss.inner, "label_smoothing", 0.2),
            lambda: loss.inner.weight.fill_(2.0),
            lambda: setattr(loss.inner, "weight", torch.ones(4)),
            lambda: setattr(loss, "inner", nn.MultiMarginLoss()),
        ):
            change()
            run.train()

    whole = both(story, lambda run: Loss())
    assert whole.reasons[2::3] == [None] * 6
    assert whole.reasons[9] is None  # values in place need no other graph


def test_a_teacher() -> None:
    def loss_of(run: Any) -> Callable:
        run.teacher = teacher = (
            nn.Sequential(nn.Sequential(layer(), nn.GELU()), nn.Dropout(0.5)).requires_grad_(False).eval()
        )

        def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(amp(x), teacher(x))

        return loss

    def story(run: Any) -> None:
        run.train()
        for mine, theirs in zip(run.model.parameters(), run.teacher.parameters(), strict=True):
            theirs.lerp_(mine.detach(), 0.5)
            theirs.data = theirs.data * 0.9
        run.train(1)
        run.teacher[1].train()
        run.train()
        run.teacher[0][1] = nn.ReLU()
        run.train()

    whole = both(story, loss_of)
    assert [whole.reasons[i] for i in (2, 3, 6, 9)] == [None] * 4


def test_a_teacher_whose_parameters_require_gradients() -> None:
    """The loss reads it without gradients; an average of the model is updated between the steps."""

    def loss_of(run: Any) -> Callable:
        run.average = average = copy.deepcopy(run.model)

        def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                target = average(x)
            return F.mse_loss(amp(x), target) + F.mse_loss(amp(x.sin()), average(x.cos()).detach())

        return loss

    def story(run: Any) -> None:
        for i in range(8):
            run.train(1)
            for mine, theirs in zip(run.model.parameters(), run.average.parameters(), strict=True):
                assert theirs.requires_grad
                assert theirs.grad is None
                with torch.no_grad():
                    theirs.lerp_(mine, 0.3)
                if i % 2:
                    theirs.data = theirs.data * 0.9

    for backend in ("eager", "aot_eager", uncompiled):
        whole = both(story, loss_of, net, backend)
        assert whole.reasons[3:] == [None] * 5


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_teacher_that_gets_gradients_runs_the_loop(is_detached: bool) -> None:
    def loss_of(run: Any) -> Callable:
        run.teacher = teacher = layer()

        def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            target = teacher(x)
            return F.mse_loss(amp(x), target.detach() if is_detached else target)

        return loss

    def story(run: Any) -> None:
        run.train(4)
        run.losses += [] if is_detached else run.teacher[0].weight.grad.flatten().tolist()

    whole = both(story, loss_of)
    assert (whole.step.reason is None) == is_detached


def weighted(run: Any) -> Callable:
    run.weight = weight = torch.ones(4)

    def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        is_dense = weight.is_contiguous()
        return F.cross_entropy((amp(x) * weight).to(weight.dtype), y) * weight.numel() * (1 + is_dense)

    return loss


def other_size(run: Any) -> None:
    run.weight.data = torch.ones(1)


def other_dtype(run: Any) -> None:
    run.weight.data = run.weight.data.bfloat16()


def other_stride(run: Any) -> None:
    run.weight.data = torch.ones(8)[::2]


@pytest.mark.parametrize("change", [other_size, other_dtype, other_stride], ids=lambda f: f.__name__)
def test_tensors_of_the_loss_that_become_others_in_place(change: Callable[[Any], None]) -> None:
    def story(run: Run) -> None:
        run.train()
        change(run)
        run.train()

    whole = both(story, weighted)
    assert "sizes, strides, dtype or requires_grad of a tensor" in str(whole.reasons[3])
    assert whole.reasons[2::3] == [None] * 2


def test_gradients_of_tensors_that_require_them_later() -> None:
    def story(run: Any) -> None:
        run.train()
        run.weight.requires_grad_()
        run.train()
        run.losses += run.weight.grad.tolist()

    assert "requires gradients and is not a parameter" in str(both(story, weighted).reasons[-1])


class Asking(nn.Module):
    """A model whose code asks for strides, offsets and gradients, and that has a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer[0].weight
        factor = 1 + (x.stride(0) == 1) + 2 * weight.is_contiguous() + 4 * (weight.storage_offset() > 0)
        factor += 8 * torch.is_grad_enabled() + 16 * weight.requires_grad
        return self.layer(x) * self.scale * factor / 8


def test_a_model_that_asks_for_strides_and_gradients() -> None:
    def story(run: Run) -> None:
        weight = run.model.layer[0].weight
        for i in range(8):  # the first trace finds that offsets count, which makes new kinds
            run.take(X if i % 2 else X.t().contiguous().t(), Y)
        weight.data = weight.data.t().contiguous().t()
        run.train()
        weight.data = torch.cat([torch.zeros(1), weight.data.flatten()])[1:].view(4, 8)
        run.train()
        weight.requires_grad_(False)
        run.train()

    whole = both(story, model=Asking)
    assert [whole.reasons[i] for i in (6, 7, 10, 13, 16)] == [None] * 5


def test_a_model_that_asks_for_strides_of_what_the_loss_holds() -> None:
    def loss_of(run: Any) -> Callable:
        run.other = other = X.clone()
        return lambda amp, x, y: F.mse_loss(amp(x), amp(other).detach())

    def story(run: Any) -> None:
        run.train()
        run.other.data = run.other.data.t().contiguous().t()
        run.train()

    assert both(story, loss_of, Asking).reasons[2::3] == [None] * 2


def test_a_buffer_that_requires_gradients() -> None:
    def story(run: Run) -> None:
        run.train()
        run.model.scale.requires_grad_()
        run.train()
        run.losses += run.model.scale.grad.tolist()

    assert "does not hold exactly" in str(both(story, model=Asking).reasons[-1])


def test_values_that_go_and_come_back_have_a_graph_each() -> None:
    def story(run: Any) -> None:
        for _ in range(3):
            for factor in (1.0, 2.0):
                run.loss_fn.factor = factor
                run.train(2)

    whole = both(story, lambda run: Loss())
    assert whole.reasons[-4:] == [None] * 4
    assert len(whole.step.graph_modules) == 2


def test_values_that_change_at_every_step_end_in_the_loop() -> None:
    def story(run: Any) -> None:
        for i in range(20):
            run.loss_fn.factor = float(i)
            run.train(1)

    whole = both(story, lambda run: Loss())
    assert "change again and again (loss_fn.factor)" in str(whole.reasons[-1])


# -- what no graph can repeat --------------------------------------------------------------------------------


def a_counter(run: Any) -> Callable:
    run.count = 0

    def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        run.count += 1
        return F.cross_entropy(amp(x), y) * run.count

    return loss


def a_history(run: Any) -> Callable:
    run.history = []

    def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        run.history.append(F.cross_entropy(amp(x), y))
        return run.history[-1]

    return loss


def a_variable(run: Any) -> Callable:
    last: Tensor | float = 0.0

    def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal last
        new = F.cross_entropy(amp(x), y) + 0.1 * last
        last = new.detach()
        return new

    return loss


def a_mean_in_place(run: Any) -> Callable:
    mean = torch.zeros(())

    def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        new = F.cross_entropy(amp(x), y)
        mean.mul_(0.9).add_(new.detach(), alpha=0.1)
        return new / (1 + mean)

    return loss


def another_memory(run: Any) -> Callable:
    def loss(amp: Any, x: Tensor, y: Tensor) -> Tensor:
        amp[0].weight.data = amp[0].weight.data * 0.9
        return F.cross_entropy(amp(x), y)

    return loss


def a_backward(run: Any) -> Callable:
    def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(amp(x), y).backward()
        return amp(x).square().mean()

    return loss


def a_number_of_a_tensor(run: Any) -> Callable:
    weight = torch.tensor(2.0)
    return lambda amp, x, y: F.cross_entropy(amp(x), y) * float(weight)


def random_numbers_of_python(run: Any) -> Callable:
    random.seed(0)
    return lambda amp, x, y: F.cross_entropy(amp(x), y) * random.random()


def random_numbers_of_numpy(run: Any) -> Callable:
    draw = np.random.default_rng(0)
    return lambda amp, x, y: F.cross_entropy(amp(x), y) * float(draw.beta(0.2, 0.2))


def batches(run: Any) -> Callable:
    def many() -> Iterator[Tensor]:
        for i in range(100):
            yield X + i / 50

    them = many()
    return lambda amp, x, y: F.cross_entropy(amp(next(them)), y)


def an_array(run: Any) -> Callable:
    weight = np.ones(4, dtype=np.float32)
    return lambda amp, x, y: F.cross_entropy(amp(x), y, weight=torch.from_numpy(weight))


def the_optimizer(run: Any) -> Callable:
    return lambda amp, x, y: F.cross_entropy(amp(x), y) * run.optimizer.param_groups[0]["lr"]


def another_converted_model(run: Any) -> Callable:
    teacher = layer().requires_grad_(False).eval()
    other = ampgraph.convert(teacher, (X,), policy="O2", dtype=torch.float16)
    return lambda amp, x, y: F.mse_loss(amp(x), other(x))


def a_part_of_a_table(run: Any) -> Callable:
    table = [X + i / 50 for i in range(300)]
    return lambda amp, x, y: F.cross_entropy(amp(table[7]), y)


def fewer_digits() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda x: x.bfloat16().to(x.dtype), lambda x: x)


def saved_with_fewer_digits(run: Run) -> Callable:
    def loss(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = amp(x)
        with fewer_digits():
            return F.cross_entropy(out.sin(), y)

    return loss


def a_checkpoint(run: Run) -> Callable:
    return lambda amp, x, y: F.cross_entropy(checkpoint(amp, x, use_reentrant=False), y)


REFUSED = {
    saved_with_fewer_digits: r"loss_fn checkpoints, or has hooks for what autograd saves \(.*surroundings",
    a_checkpoint: "loss_fn checkpoints",
    a_counter: "loss_fn changes",
    a_history: "loss_fn changes",
    a_variable: "loss_fn changes",
    a_mean_in_place: r"loss_fn writes to a tensor that is no argument \(.*test_step_surroundings",
    another_memory: r"loss_fn replaces the memory of a tensor \(.*test_step_surroundings",
    a_backward: "loss_fn calls backward",
    a_number_of_a_tensor: r"loss_fn reads the value of a tensor that is no argument \(",
    random_numbers_of_python: "loss_fn draws from random",
    random_numbers_of_numpy: "loss_fn draws from .*draw",
    batches: "them, an iterator; pass its items as arguments",
    an_array: "weight, an array; pass it as a tensor",
    the_optimizer: "run.optimizer, whose numbers change",
    another_converted_model: "other, another converted model",
    a_part_of_a_table: r"sizes \(6, 8\) that is neither an argument nor in a variable",
}


@pytest.mark.parametrize("loss_of", REFUSED, ids=lambda loss_of: loss_of.__name__)
def test_losses_that_no_graph_can_repeat_run_the_loop(loss_of: Callable[[Run], Callable]) -> None:
    with pytest.warns(UserWarning, match=REFUSED[loss_of]):
        whole = both(lambda run: run.train(4), loss_of)
    assert whole.step.reason is not None


def test_hooks_for_what_autograd_saves_around_a_step() -> None:
    def story(run: Run) -> None:
        run.train()
        with fewer_digits():
            run.train()
        run.train(1)

    whole = both(story, lambda run: lambda amp, x, y: F.cross_entropy(amp(x).sin(), y))
    assert [reason is None for reason in whole.reasons[2:]] == [True, False, False, False, True]


class Attention(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).view(1, 1, 6, 4)
        return F.scaled_dot_product_attention(y, y.sin(), y.cos()).view(6, 4)


def test_kernels_that_torch_is_told_to_take() -> None:
    def story(run: Run) -> None:
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(kernel):
                run.train(4)

    assert both(story, model=Attention).reasons[-1] is None


def test_arguments_that_are_conjugate() -> None:
    values = torch.view_as_complex(X.view(6, 4, 2)).clone()

    def story(run: Run) -> None:
        for x in (values, values.conj(), values, values.conj(), values):
            run.take(x, Y)
            run.take(x, Y)

    def loss_of(run: Run) -> Callable:
        return lambda amp, x, y: F.cross_entropy(amp(torch.cat([x.real, x.imag], 1)), y)

    assert both(story, loss_of).reasons[-2:] == [None, None]


def test_arguments_whose_content_no_key_holds() -> None:
    def loss_of(run: Run) -> Callable:
        return lambda amp, batch: F.cross_entropy(amp(torch.as_tensor(batch["x"])), batch["y"])

    def story(run: Run) -> None:
        for i in range(8):
            run.take(UserDict(x=X + i / 9, y=Y))

    assert "an argument is a UserDict" in str(both(story, loss_of).reasons[-1])

    def arrays(run: Run) -> None:
        for i in range(8):
            run.take({"x": (X + i / 9).numpy(), "y": Y})

    assert "an argument is a ndarray" in str(both(arrays, loss_of).reasons[-1])
