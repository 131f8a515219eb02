"""A loop that forgets the scaler, or brings another, is told so by its second step; a right loop is not."""

from __future__ import annotations

import contextlib
import copy
import linecache
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy, StaticLossScale
from ampgraph.training.unscaled_step_warning import UnscaledStepWarning

from .cases import every_pair

pytestmark = pytest.mark.usefixtures("shared_captures")
FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))
DOUBLE = r"a torch\.amp\.GradScaler multiplies the loss"


class Words(nn.Module):
    """The first parameter has a row that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(16, 8, padding_idx=0), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.words(ids)).mean(1))


IDS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])


def converted(policy: Policy = FLOAT16, just_in_time: bool = False) -> ampgraph.AmpModule:
    torch.manual_seed(0)
    return ampgraph.convert(Words(), None if just_in_time else (IDS,), policy=policy)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(IDS).square().mean()


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
        messages += [str(w.message) for w in caught if "scale" in str(w.message)]


def steps(amp: nn.Module, optimizer: Any, rounds: int = 2, batches: int = 1) -> None:
    for _ in range(rounds):
        for _ in range(batches):
            loss_of(amp).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(amp: nn.Module) -> None:
    """Four rounds without any optimizer."""
    for _ in range(4):
        loss_of(amp).backward()
        with torch.no_grad():
            for p in (p for p in amp.parameters() if p.grad is not None):
                p.sub_(p.grad, alpha=0.1)
                p.grad = None


OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused-sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused-adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_forgotten_attach_is_told_by_the_second_step(kind, just_in_time) -> None:
    amp = converted(just_in_time=just_in_time)
    with told() as messages:
        steps(amp, OPTIMIZERS[kind](amp.parameters()))
    assert len(messages) == 1
    assert "amp.scaler.attach(optimizer)" in messages[0]


@pytest.mark.parametrize("batches", [1, 3])
def test_a_forgotten_attach_is_told_with_frozen_parameters_and_micro_batches(batches) -> None:
    amp = converted()
    amp.words.requires_grad_(False)
    amp.norm.requires_grad_(False)
    with told() as messages:
        steps(amp, torch.optim.SGD([p for p in amp.parameters() if p.requires_grad], lr=0.1), batches=batches)
    assert len(messages) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_steps_by_hand_are_told(frozen) -> None:
    amp = converted()
    amp.words.requires_grad_(not frozen)
    with told() as messages:
        by_hand(amp)
    assert len(messages) == 1
    assert "the loop changes its parameters after every backward" in messages[0]


def test_parameters_that_change_between_two_backwards_are_no_steps() -> None:
    """Pruning, for example, or a checkpoint."""
    amp = converted()
    with told() as messages:
        amp(IDS).square().mean().backward()
        for _ in range(5):
            amp(IDS)
            with torch.no_grad():
                amp.out.weight.mul_(0.5)
    assert not messages


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def late_second_phase(amp: ampgraph.AmpModule) -> None:
    """Twenty rounds with an attached optimizer of the head; then the whole model is tuned."""
    head = sgd(amp.out.parameters())
    amp.scaler.attach(head)
    steps(amp, head, rounds=20)
    steps(amp, sgd(amp.parameters()), rounds=2)


def late_after_grad_scaler_style(amp: ampgraph.AmpModule) -> None:
    right_stepped(amp, sgd(amp.parameters()), rounds=20)
    steps(amp, sgd(amp.parameters()), rounds=2)


def late_many_micro_batches(amp: ampgraph.AmpModule) -> None:
    steps(amp, sgd(amp.parameters()), rounds=2, batches=16)


def late_beside_an_attached_one(amp: ampgraph.AmpModule) -> None:
    attached, plain = sgd(amp.out.parameters()), sgd(amp.norm.parameters())
    amp.scaler.attach(attached)
    for i in range(20):
        loss_of(amp).backward()
        attached.step()
        if i > 12:
            plain.step()


def late_group(amp: ampgraph.AmpModule) -> None:
    """An optimizer of another model takes over parameters of this one."""
    optimizer = sgd(nn.Linear(2, 2).parameters())
    steps(amp, optimizer, rounds=12)
    optimizer.add_param_group({"params": list(amp.out.parameters())})
    steps(amp, optimizer)


def late_layer(amp: ampgraph.AmpModule) -> None:
    """A layer that came after the conversion."""
    amp.source.late = nn.Linear(2, 2)
    attached = sgd(amp.parameters())
    amp.scaler.attach(attached)
    steps(amp, attached, rounds=12)
    steps(amp, sgd(amp.source.late.parameters()))


def late_copy(amp: ampgraph.AmpModule) -> None:
    """A copied optimizer is another one; its step asks nobody."""
    optimizer = sgd(amp.parameters())
    amp.scaler.attach(optimizer)
    steps(amp, optimizer, rounds=12)
    twin = copy.copy(optimizer)
    steps(amp, twin)


LATE = [
    late_second_phase,
    late_after_grad_scaler_style,
    late_many_micro_batches,
    late_beside_an_attached_one,
    late_group,
    late_layer,
    late_copy,
]


@pytest.mark.parametrize("loop", LATE)
@pytest.mark.parametrize("just_in_time", [False, True])
def test_a_plain_step_is_told_however_late(loop, just_in_time) -> None:
    amp = converted(just_in_time=just_in_time)
    with told() as messages:
        loop(amp)
    assert len(messages) == 1
    assert "SGD.step() happens after every backward" in messages[0]


def test_each_optimizer_is_told_once() -> None:
    amp = converted()
    with told() as messages:
        for _ in range(2):
            steps(amp, sgd(amp.parameters()), rounds=3)
    assert len(messages) == 2


def test_steps_by_hand_after_many_micro_batches_are_told() -> None:
    amp = converted()
    with told() as messages:
        for _ in range(3):
            for _ in range(16):
                loss_of(amp).backward()
            with torch.no_grad():
                for p in amp.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
    assert len(messages) == 1
    assert "the loop changes its parameters after every backward" in messages[0]


def test_a_step_that_asks_is_not_looked_into(monkeypatch) -> None:
    """What an optimizer holds is looked up once, and never where its steps ask."""
    amp, other = converted(), nn.Linear(2, 2)
    attached, stranger = sgd(amp.parameters()), sgd(other.parameters())
    amp.scaler.attach(attached)
    looked: list[Any] = []
    known = UnscaledStepWarning._holds_own

    def noted(watch: UnscaledStepWarning, optimizer: torch.optim.Optimizer) -> bool:
        if watch is amp.scaler._watch:  # models of other tests may watch too
            looked.append(optimizer)
        return known(watch, optimizer)

    monkeypatch.setattr(UnscaledStepWarning, "_holds_own", noted)
    for _ in range(20):
        loss_of(amp).backward()
        attached.step()
        stranger.step()
    assert looked == [stranger]


def test_a_scale_that_skips_and_changes_nothing_is_not_asked_for() -> None:
    scale = StaticLossScale(1024.0, skip_on_overflow=False)
    amp = converted(Policy(dtype=torch.float16, loss_scale=scale))
    with told() as messages:
        steps(amp, sgd(amp.parameters()), rounds=4)
        by_hand(amp)
    assert messages == []


def right_attached(amp: ampgraph.AmpModule, optimizer: torch.optim.Optimizer) -> None:
    amp.scaler.attach(optimizer)
    steps(amp, optimizer, rounds=4, batches=2)


def right_stepped(amp: ampgraph.AmpModule, optimizer: torch.optim.Optimizer, rounds: int = 4) -> None:
    for _ in range(rounds):
        amp.scaler.scale(loss_of(amp)).backward()
        amp.scaler.step(optimizer)
        amp.scaler.update()
        optimizer.zero_grad()


def right_evaluation(amp: ampgraph.AmpModule, optimizer: torch.optim.Optimizer) -> None:
    amp.eval()
    for _ in range(4):
        loss_of(amp)
        with torch.no_grad():
            loss_of(amp)


def right_gradients_alone(amp: ampgraph.AmpModule, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        loss_of(amp).backward()


def right_another_model_steps(amp: ampgraph.AmpModule, optimizer: torch.optim.Optimizer) -> None:
    other = nn.Linear(8, 1)
    its = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(4):
        (loss_of(amp) + other(torch.ones(1, 8)).sum()).backward()
        its.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "loop",
    [right_attached, right_stepped, right_evaluation, right_gradients_alone, right_another_model_steps],
)
def test_a_right_loop_is_told_nothing(loop, fused) -> None:
    amp = converted()
    with told() as messages:
        loop(amp, torch.optim.AdamW(amp.parameters(), fused=fused))
    assert messages == []


def test_a_loop_without_a_loss_scale_is_told_nothing() -> None:
    amp = converted(Policy(dtype=torch.float16, loss_scale=NoLossScale()))
    with told() as messages:
        steps(amp, torch.optim.SGD(amp.parameters(), lr=0.1), rounds=4)
        by_hand(amp)
        theirs = torch.amp.GradScaler("cpu")
        theirs.scale(loss_of(amp)).backward()
    assert messages == []


def test_step_tells_of_an_optimizer_of_another_model_once() -> None:
    amp, other = converted(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss_of(amp).backward()
    with told() as messages:
        for _ in range(2):
            amp.scaler.step(optimizer)
            amp.scaler.update()
    messages = [m for m in messages if "amp.scaler.step" in m]
    assert len(messages) == 1
    assert "none of the 2 parameters of this SGD belongs to this model." in messages[0]


def test_an_optimizer_of_a_number_beside_the_model_is_told_nothing() -> None:
    """The temperature of soft actor-critic."""
    amp, number = converted(), torch.zeros(1, requires_grad=True)
    optimizers = [torch.optim.SGD(amp.parameters(), lr=0.1), torch.optim.SGD([number], lr=0.1)]
    with told() as messages:
        for _ in range(2):
            loss = loss_of(amp)
            amp.scaler.scale(loss).backward()
            amp.scaler.scale(number.exp().sum()).backward()
            for optimizer in optimizers:
                amp.scaler.step(optimizer)
                optimizer.zero_grad()
            amp.scaler.update()
    assert messages == []
    assert number.item() < 0


# -- Hugging Face's Trainer ----------------------------------------------------------------------------


def bert_trainer(folder: Any, **options: Any) -> Any:
    """A Trainer with a tiny BERT, whose first parameter has a row that no step changes."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=16, **sizes))
    rows = [{"input_ids": torch.arange(i % 8, i % 8 + 4), "labels": i % 2} for i in range(48)]
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, **quiet, **options}
    return transformers.Trainer(
        model, transformers.TrainingArguments(str(folder), **options), train_dataset=rows
    )


@pytest.mark.parametrize(
    ("batches", "is_attached", "optimizer"),
    every_pair((1, 12), (False, True), ("adamw_torch", "adamw_torch_fused")),
)
def test_a_trainer_with_bert(is_attached, optimizer, batches, tmp_path) -> None:
    trainer = bert_trainer(tmp_path, optim=optimizer, gradient_accumulation_steps=batches)
    blocks = ampgraph.convert_blocks(trainer.model, "", policy=FLOAT16)
    if is_attached:
        blocks.scaler.attach(trainer.create_optimizer())
    with told() as messages:
        trainer.train()
    assert len(messages) == (0 if is_attached else 1)
    assert all("amp.scaler.attach(optimizer)" in m for m in messages)


# -- torch's GradScaler around a converted model -------------------------------------------------------


class Holder:
    """As Trainers do, holds the scaler by an attribute, and calls backward in a method."""

    def __init__(self, **options: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **options)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()


def left_over(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    loss = loss_of(amp)
    scaler.scale(loss).backward()


def left_over_unnamed(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(loss_of(amp)).backward()


def left_over_in_a_part(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    loss = loss_of(amp)
    scaler.scale(loss / 4).backward()


def left_over_divided(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    loss = loss_of(amp)
    (scaler.scale(loss) / 4).backward()


def left_over_in_an_object(amp: nn.Module) -> None:
    Holder().backward(loss_of(amp))


def left_over_of_several(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    torch.autograd.backward(scaler.scale([loss_of(amp), loss_of(amp)]))


def left_over_in_variables(amp: nn.Module) -> None:
    """Beside another loss, which is not scaled."""
    scaler, other = torch.amp.GradScaler("cpu", init_scale=128.0), nn.Linear(2, 1)
    loss = other(torch.ones(1, 2)).sum()
    loss.backward()
    loss = scaler.scale(loss_of(amp))
    part = loss
    part /= 4
    part.backward()


def left_over_in_lines(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(
        loss_of(amp)  # of this model
    ).backward()


def left_over_without_source(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    exec("scaler.scale(loss_of(amp)).backward()", {**globals(), "scaler": scaler, "amp": amp})


def left_over_beside_other_code(amp: nn.Module) -> None:
    """As in ``python -c`` of Python 3.13, whose code has the name of code without source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(linecache.cache, "<string>", (7, None, ["x = 1\n"] * 9, "<string>"))
        left_over_without_source(amp)


def left_over_in_a_dict(amp: nn.Module) -> None:
    scaler, held = torch.amp.GradScaler("cpu"), {}
    held["loss"] = scaler.scale(loss_of(amp))
    held["loss"].backward()


def left_over_in_a_loop(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for loss in (scaler.scale(loss_of(amp)),):
        loss.backward()


def left_over_in_a_condition(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    if (loss := scaler.scale(loss_of(amp))) is not None:
        loss.backward()


def left_over_under_another_name(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scale = scaler.scale
    scale(loss_of(amp)).backward()


def left_over_for_the_next_round(amp: nn.Module) -> None:
    scaler, loss = torch.amp.GradScaler("cpu"), None
    for _ in range(2):
        if loss is not None:
            loss.backward()
        loss = scaler.scale(loss_of(amp))


LEFT_OVER = [
    left_over_in_a_dict,
    left_over_in_a_loop,
    left_over_in_a_condition,
    left_over_under_another_name,
    left_over_for_the_next_round,
    left_over_without_source,
    left_over_beside_other_code,
    left_over_in_lines,
    left_over_in_variables,
    left_over,
    left_over_unnamed,
    left_over_in_a_part,
    left_over_divided,
    left_over_in_an_object,
    left_over_of_several,
]


@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("loop", LEFT_OVER)
def test_a_grad_scaler_left_in_the_loop_is_named(loop, just_in_time) -> None:
    amp = converted(just_in_time=just_in_time)
    with pytest.warns(UserWarning, match=DOUBLE):
        loop(amp)


def times_two_beside_a_disabled(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = scaler.scale(loss_of(amp))
    (loss * 2.0).backward()


def times_two_beside_an_unused(amp: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loss = loss_of(amp)
    (loss * 2.0).backward()
    assert scaler.is_enabled()


def times_two_beside_that_of_another_model(amp: nn.Module) -> None:
    scaler, other = torch.amp.GradScaler("cpu"), nn.Linear(2, 1)
    its_loss = other(torch.ones(1, 2)).sum()
    scaler.scale(its_loss).backward()
    loss = loss_of(amp)
    (loss * 2.0).backward()


def weighted_beside_that_of_another_model(amp: nn.Module) -> None:
    scaler, other = torch.amp.GradScaler("cpu"), nn.Linear(2, 1)
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    (loss_of(amp) * 3.0).backward()


def weighted_in_a_variable_beside_that_of_another_model(amp: nn.Module) -> None:
    scaler, other = torch.amp.GradScaler("cpu"), nn.Linear(2, 1)
    loss = scaler.scale(other(torch.ones(1, 2)).sum())
    loss.backward()
    loss = loss_of(amp) * 65536.0
    loss.backward()


def unscaled_beside_that_of_another_model(amp: nn.Module) -> None:
    scaler, other = torch.amp.GradScaler("cpu"), nn.Linear(2, 1)
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    loss_of(amp).backward()


def scaled_by_its_own_beside_that_of_another_model(amp: nn.Module) -> None:
    scaler, other = torch.amp.GradScaler("cpu"), nn.Linear(2, 1)
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    through(amp, amp.scaler)


def through(amp: nn.Module, scaler: Any) -> None:
    (scaler.scale(loss_of(amp)) / 2).backward()


def weighted_with_a_disabled_holder(amp: nn.Module) -> None:
    Holder(enabled=False).backward(loss_of(amp) * 0.5)


@pytest.mark.parametrize(
    "loop",
    [
        times_two_beside_a_disabled,
        times_two_beside_an_unused,
        times_two_beside_that_of_another_model,
        weighted_beside_that_of_another_model,
        weighted_in_a_variable_beside_that_of_another_model,
        unscaled_beside_that_of_another_model,
        scaled_by_its_own_beside_that_of_another_model,
        weighted_with_a_disabled_holder,
    ],
)
def test_a_loss_times_a_number_is_no_grad_scaler(loop) -> None:
    amp = converted()
    with told() as messages:
        loop(amp)
    assert messages == []
