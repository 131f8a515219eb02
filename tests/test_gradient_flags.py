"""A step is judged by the gradients that it takes: wherever they come from, and only by those."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, Policy
from ampgraph._compat import note_of
from ampgraph.training.gradient_flags import MARK

from .models import TwoHeads

pytestmark = pytest.mark.usefixtures("shared_captures")
INF = float("inf")
FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def convert(source: nn.Module | None = None, backend: str = "eager") -> ampgraph.AmpModule:
    source = source or nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return ampgraph.convert(source, (torch.randn(4, 8),), policy=FLOAT16, backend=backend)


def batch(bad: bool = False) -> torch.Tensor:
    x = torch.randn(4, 8)
    x[0, 0] = INF if bad else 1.0
    return x


def values(*modules: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for module in modules for p in module.parameters()]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# -- where gradients come from -----------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("fused", [False, True])
def test_a_trunk_behind_a_partly_frozen_head(backend, fused) -> None:
    trunk, amp = nn.Linear(8, 8), convert(backend=backend)
    amp.get_parameter("0.weight").requires_grad_(False)
    heads = torch.optim.SGD([p for p in amp.parameters() if p.requires_grad], lr=0.1, fused=fused)
    trunks = torch.optim.SGD(trunk.parameters(), lr=0.1, fused=fused)
    with pytest.warns(UserWarning, match="none of the 2 parameters"):
        amp.scaler.attach(heads, trunks)
    before = values(trunk, amp)
    amp(trunk(batch(bad=True))).sum().backward()
    heads.step()
    trunks.step()
    assert same(before, values(trunk, amp))
    assert amp.scaler.get_scale() == 512.0


@BACKENDS
def test_a_head_that_came_after_the_conversion(backend) -> None:
    amp = convert(backend=backend)
    amp.source.add_module("late", nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (amp.source[0], amp.source.late)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp.scaler.attach(*optimizers)
    before = values(amp)
    (amp.source.late(amp(batch())) * INF).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert same(before, values(amp))


@pytest.mark.parametrize("assign", ["replace", "add", "write"])
def test_autograd_grad_after_a_backward(assign) -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = values(amp)
    amp(batch()).sum().backward()
    bad = torch.autograd.grad(amp(batch(bad=True)).sum(), list(amp.parameters()))
    for p, gradient in zip(amp.parameters(), bad, strict=True):
        if assign == "replace":
            p.grad = gradient
        elif assign == "add":
            p.grad = p.grad + gradient
        else:
            p.grad.copy_(gradient)
    optimizer.step()
    assert same(before, values(amp))


@pytest.mark.parametrize("fused", [False, True])
def test_hand_made_gradient_of_what_the_backward_left_out(fused) -> None:
    amp = ampgraph.convert(TwoHeads(), (batch(), batch()), policy=FLOAT16)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, fused=fused)
    amp.scaler.attach(optimizer)
    before = values(amp)
    amp.a.weight.grad = torch.full_like(amp.a.weight, INF)
    amp(batch(), batch())[1].sum().backward()
    optimizer.step()
    assert same(before, values(amp))


@pytest.mark.parametrize("fused", [False, True])
@BACKENDS
def test_a_plain_head_in_the_same_optimizer(fused, backend) -> None:
    amp, head = convert(backend=backend), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([*amp.parameters(), *head.parameters()], fused=fused)
    amp.scaler.attach(optimizer)
    before = values(amp, head)
    (amp(batch()).sum() + head(torch.full((1, 4), INF)).sum()).backward()
    optimizer.step()
    assert same(before, values(amp, head))
    assert amp.scaler.get_scale() == 512.0


@BACKENDS
def test_a_parameter_that_the_loss_reads_too(backend) -> None:
    """A penalty by hand, whose gradient is infinite where that of the graph is not."""
    amp = convert(backend=backend)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        before = values(amp)
        penalty = sum((p - p.detach()).sqrt().sum() for p in amp.parameters())
        (amp(batch()).sum() + penalty).backward()
        optimizer.step()
        assert same(before, values(amp))


def test_a_hook_that_changes_the_gradient() -> None:
    amp = convert()
    amp.get_parameter("0.weight").register_hook(lambda g: g * INF)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = values(amp)
    amp(batch()).sum().backward()
    optimizer.step()
    assert same(before, values(amp))


@pytest.mark.parametrize("bad", [0, 1])
def test_one_scaler_for_two_converted_models(bad) -> None:
    models = convert(), convert()
    scaler = models[0].scaler
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    before = values(*models)
    for i, model in enumerate(models):
        model(batch(bad=i == bad)).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert same(before, values(*models))
    assert [m.scaler.get_scale() for m in models] == [512.0 if i == bad else 1024.0 for i in range(2)]


# -- what only looks like the boundary's ---------------------------------------------------------------


def stepping(amp: nn.Module, scaler: ampgraph.LossScaler) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    scaler.attach(optimizer)
    return optimizer


def spoil(p: torch.Tensor, how: str) -> None:
    """Makes a gradient infinite, as a hook on its parameter would."""
    if how == "assign":
        p.grad = p.grad * INF
    elif how == "write":
        p.grad.mul_(INF)
    elif how == "data":
        p.grad.data.fill_(INF)
    else:
        p.grad.data = torch.full_like(p.grad, INF)


HOW = pytest.mark.parametrize("how", ["assign", "write", "data", "replaced data"])


@BACKENDS
@HOW
def test_a_hook_after_accumulation(backend, how) -> None:
    amp = convert(backend=backend)
    optimizer, before = stepping(amp, amp.scaler), values(amp)
    for p in amp.parameters():
        p.register_post_accumulate_grad_hook(lambda p: spoil(p, how))
    amp(batch()).sum().backward()
    optimizer.step()
    assert same(before, values(amp))
    assert amp.scaler.get_scale() == 512.0


@BACKENDS
@pytest.mark.parametrize("after", [False, True])
def test_a_hook_on_the_node_that_accumulates(backend, after) -> None:
    amp = convert(backend=backend)
    optimizer, before = stepping(amp, amp.scaler), values(amp)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in amp.parameters()]
    for p, node in zip(amp.parameters(), nodes, strict=True):
        if after:
            node.register_hook(lambda *_, p=p: spoil(p, "assign"))
        else:
            node.register_prehook(lambda grads: tuple(g * INF for g in grads))
    amp(batch()).sum().backward()
    optimizer.step()
    assert same(before, values(amp))
    assert amp.scaler.get_scale() == 512.0


@BACKENDS
@pytest.mark.parametrize("how", ["assign", "write", "replaced data"])
def test_a_change_between_backward_and_step(backend, how) -> None:
    amp = convert(backend=backend)
    optimizer, before = stepping(amp, amp.scaler), values(amp)
    amp(batch()).sum().backward()
    for p in amp.parameters():
        spoil(p, how)
    optimizer.step()
    assert same(before, values(amp))


@BACKENDS
def test_a_gradient_that_is_handed_to_another_parameter(backend) -> None:
    amp = ampgraph.convert(TwoHeads(), (batch(), batch()), policy=FLOAT16, backend=backend)
    optimizer, before = stepping(amp, amp.scaler), values(amp)
    amp(batch(), batch(bad=True))[1].sum().backward()
    good = amp.b.weight.grad
    amp.zero_grad()
    amp(batch(), batch())[0].sum().backward()
    amp.a.weight.grad = good
    optimizer.step()
    assert same(before, values(amp))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.a(h), self.b(h.detach())


@BACKENDS
@pytest.mark.parametrize("separate", [False, True])
def test_autograd_grad_before_a_backward(backend, separate) -> None:
    """The backward reaches other parameters than those whose gradients were assigned."""
    amp = ampgraph.convert(Trunk(), (batch(),), policy=FLOAT16, backend=backend)
    optimizer, before = stepping(amp, amp.scaler), values(amp)
    parameters = [*amp.trunk.parameters(), *amp.a.parameters()]
    a, b = amp(batch())
    bad = torch.autograd.grad(a.sum() * INF, parameters, retain_graph=not separate)
    for p, gradient in zip(parameters, bad, strict=True):
        p.grad = gradient
    b = amp(batch())[1] if separate else b
    b.sum().backward()
    optimizer.step()
    assert same(before, values(amp))


@BACKENDS
@pytest.mark.parametrize("warm", [0, 1])
def test_a_block_whose_output_the_loss_leaves_out(backend, warm) -> None:
    model = TwoHeads()
    blocks = ampgraph.convert_blocks(model, ("a", "b"), policy=FLOAT16, backend=backend)
    optimizer = stepping(model, blocks.scaler)
    for _ in range(warm):
        sum(out.mean() for out in model(batch(), batch())).backward()
        optimizer.step()
        optimizer.zero_grad()
    nn.init.zeros_(model.b.weight)
    before = values(model)
    a, _ = model(batch(), batch())
    (a.mean() + model.b.weight.square().sum().sqrt()).backward()  # 0/0
    optimizer.step()
    assert same(before, values(model))
    assert blocks.scaler.get_scale() == 512.0


@BACKENDS
@pytest.mark.parametrize("penalty", [torch.Tensor.sum, lambda p: p.square().sum()], ids=["expanded", "dense"])
@pytest.mark.parametrize("first", [False, True])
def test_a_penalty_whose_gradient_autograd_adds_to_the_graphs(backend, penalty, first) -> None:
    amp = convert(backend=backend)
    optimizer = stepping(amp, amp.scaler)
    for _ in range(2):
        optimizer.zero_grad()
        before = values(amp)
        early = sum(penalty(p) for p in amp.parameters()) * INF if first else 0.0
        out = amp(batch()).sum()
        late = 0.0 if first else sum(penalty(p) for p in amp.parameters()) * INF
        (out + early + late).backward()
        optimizer.step()
        assert same(before, values(amp))


# -- a backward that raises ---------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("clear", [False, True])
def test_a_backward_that_raises_leaves_nothing(backend, clear) -> None:
    amp, trunk, failures = convert(backend=backend), nn.Linear(8, 8), [1]
    optimizer = stepping(amp, amp.scaler)
    hidden = trunk(batch())

    def fail(gradient: torch.Tensor) -> None:
        if failures:
            raise RuntimeError("out of memory")

    hidden.register_hook(fail)
    before = values(amp)
    with pytest.raises(RuntimeError, match="out of memory"):
        (amp(hidden) * INF).sum().backward()
    failures.clear()
    assert amp.scaler.state.probe.grad is None
    for p in amp.parameters():
        p.grad = None if clear else torch.zeros_like(p)
    amp(batch()).sum().backward()
    optimizer.step()
    assert not same(before, values(amp))
    assert amp.scaler.get_scale() == 1024.0


# -- how long flags live -----------------------------------------------------------------------------


@pytest.mark.parametrize("clear", ["optimizer", "model", "by hand", "zero", "data"])
@BACKENDS
def test_flags_end_with_their_gradients(clear, backend) -> None:
    amp = convert(backend=backend)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    amp(batch(bad=True)).sum().backward()
    if clear == "optimizer":
        optimizer.zero_grad()
    elif clear == "model":
        amp.zero_grad()
    elif clear == "zero":
        optimizer.zero_grad(set_to_none=False)
    for p in amp.parameters():
        if clear == "by hand":
            p.grad = None
        elif clear == "data":
            p.grad.data.zero_()
    before = values(amp)
    amp(batch()).sum().backward()
    optimizer.step()
    assert not same(before, values(amp))
    # Of a step that was left out the scale hears, but of a write through .data nobody does.
    assert amp.scaler.get_scale() == (1024.0 if clear == "data" else 512.0)


@pytest.mark.parametrize("through", ["grad", "data"])
def test_an_overflow_times_zero_is_nan_and_skips(through) -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    amp(batch(bad=True)).sum().backward()
    for p in amp.parameters():
        (p.grad if through == "grad" else p.grad.data).mul_(0)
    before = values(amp)
    amp(batch()).sum().backward()
    optimizer.step()
    assert same(before, values(amp))
    assert amp.scaler.get_scale() == 512.0


def test_rollback_after_a_bad_backward() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    saved = copy.deepcopy((amp.state_dict(), optimizer.state_dict(), amp.scaler.state_dict()))
    amp(batch(bad=True)).sum().backward()
    amp.scaler.step(optimizer)
    for part, state in zip((amp, optimizer, amp.scaler), saved, strict=True):
        part.load_state_dict(state)
    optimizer.zero_grad()
    before = values(amp)
    amp(batch()).sum().backward()
    amp.scaler.step(optimizer)
    amp.scaler.update()
    assert not same(before, values(amp))
    assert amp.scaler.get_scale() == 1024.0


def test_the_other_half_of_a_gan() -> None:
    """The generator's bad backward leaves gradients in the discriminator, which its own turn clears."""
    generator, discriminator = convert(nn.Sequential(nn.Linear(8, 8))), convert()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator)]
    for model, optimizer in zip((generator, discriminator), optimizers, strict=True):
        model.scaler.attach(optimizer)
    (discriminator(generator(batch())) * INF).sum().backward()
    optimizers[0].step()
    before = values(discriminator)
    optimizers[1].zero_grad()
    discriminator(batch()).sum().backward()
    optimizers[1].step()
    assert not same(before, values(discriminator))
    assert discriminator.scaler.get_scale() == 512.0  # the generator's step waits for it


def test_a_group_added_later() -> None:
    amp = ampgraph.convert(TwoHeads(), (batch(), batch()), policy=FLOAT16)
    optimizer = torch.optim.SGD(amp.a.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    amp(batch(), batch(bad=True))[1].sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(amp.b.parameters())})
    optimizer.zero_grad()
    before = values(amp.b)
    amp(batch(), batch())[1].sum().backward()
    optimizer.step()
    assert not same(before, values(amp.b))


def test_a_round_without_gradients_counts_for_nothing() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.step(optimizer)
    amp.scaler.update()
    amp.scaler.update()
    assert amp.scaler.state_dict()["_growth_tracker"] == amp.scaler.state_dict()["_steps"] == 0


def test_true_gradients_of_a_model_whose_inputs_overflow() -> None:
    """Only the gradient of the input is infinite: nothing that the optimizer takes."""
    amp = ampgraph.convert(TwoHeads(), (batch(), batch()), policy=FLOAT16)
    optimizer = torch.optim.SGD(amp.a.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    x, before = batch().requires_grad_(), values(amp.a)
    a, b = amp(batch(), x)
    (a.sum() + b.sum() * INF).backward()
    optimizer.step()
    assert not same(before, values(amp.a))
    assert amp.scaler.get_scale() == 1024.0


# -- what it costs -----------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("early", [False, True])
def test_a_plain_step_reads_no_gradient_again(backend, early, monkeypatch) -> None:
    amp = convert(backend=backend)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    read: list[int] = []
    known = type(amp.scaler._flags)._read
    monkeypatch.setattr(type(amp.scaler._flags), "_read", lambda s, g: read.append(len(g)) or known(s, g))
    for _ in range(3):
        optimizer.zero_grad()
        amp(batch()).sum().backward()
        if early:
            amp.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(amp.parameters(), 0.1)
        optimizer.step()
    assert read[1:] == [0, 0]


def test_gradients_with_flags_are_tensors_like_others() -> None:
    amp = convert()
    amp(batch()).sum().backward()
    for p in amp.parameters():
        assert note_of(p.grad, MARK) is not None
        for other in (copy.deepcopy(p.grad), pickle.loads(pickle.dumps(p.grad))):
            assert torch.equal(other, p.grad)
    copy.deepcopy(amp.source)


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_that_are_given_as_data_count(bad) -> None:
    """As ``p.grad.data = gradient`` of ``torch.autograd.grad``: neither objects nor versions are new."""
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    amp(batch()).sum().backward()
    optimizer.step()
    before = values(amp)
    found = torch.autograd.grad(amp(batch(bad=bad)).sum(), [*amp.parameters()])
    for p, gradient in zip(amp.parameters(), found, strict=True):
        p.grad.data = gradient
    optimizer.step()
    assert same(before, values(amp)) is bad
    assert amp.scaler.get_scale() == (512.0 if bad else 1024.0)
    assert amp.scaler.state_dict()["_growth_tracker"] == (0 if bad else 2)


def test_data_that_is_given_twice_at_one_address() -> None:
    amp = convert()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    amp(batch()).sum().backward()
    before = values(amp)
    for p in amp.parameters():
        address, held = p.grad.data_ptr(), []
        p.grad.data = p.grad.data.clone()  # frees the memory that was checked
        while len(held) < 100 and (not held or held[-1].data_ptr() != address):
            held.append(torch.full_like(p.grad, INF))
        p.grad.data = held[-1]
    optimizer.step()
    assert same(before, values(amp))


# -- changed in place --------------------------------------------------------------------------------


CHANGES = {
    "clip": lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0),
    "sign": lambda parameters: [p.grad.sign_() for p in parameters],
    "clamp": lambda parameters: [p.grad.clamp_(-1.0, 1.0) for p in parameters],
    "nan to number": lambda parameters: [p.grad.nan_to_num_(1.0, 1.0, -1.0) for p in parameters],
}


@BACKENDS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("batches", [[True], [False, True, False]])
def test_an_overflow_made_finite_in_place_is_skipped(backend, change, batches) -> None:
    amp = convert(backend=backend)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = values(amp)
    for scale in (512.0, 256.0):
        optimizer.zero_grad()
        for bad in batches:
            (amp(batch()).sum() * (INF if bad else 1.0)).backward()
        CHANGES[change](list(amp.parameters()))
        optimizer.step()
        assert same(before, values(amp))
        assert amp.scaler.get_scale() == scale
    optimizer.zero_grad()
    amp(batch()).sum().backward()
    CHANGES[change](list(amp.parameters()))
    optimizer.step()
    assert not same(before, values(amp))
    assert amp.scaler.get_scale() == 256.0


def test_flags_end_with_gradients_that_are_zeroed_while_others_are_made() -> None:
    amp = ampgraph.convert(TwoHeads(), (batch(), batch()), policy=FLOAT16)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    (amp(batch(), batch())[0].sum() * INF).backward()
    optimizer.zero_grad(set_to_none=False)
    before = values(amp.b)
    amp(batch(), batch())[1].sum().backward()
    optimizer.step()
    assert not same(before, values(amp.b))
    assert amp.scaler.get_scale() == 512.0
