"""A pending backward reads the low copies that its forward read, whatever refreshes them before it runs."""

import copy
import gc
import warnings

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn

import ampgraph
from ampgraph import Policy

BF16 = torch.bfloat16
X = torch.randn(8, 16, 8, generator=torch.Generator().manual_seed(0))
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
CAPTURES = pytest.mark.parametrize("args", [(X[0],), None], ids=["ahead of time", "just in time"])
pytestmark = pytest.mark.usefixtures("shared_captures")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def converted(args=(X[0],), backend="eager", dtype=BF16, **options):
    model = net()
    policy = Policy("O1", dtype=dtype, **options)
    return model, ampgraph.convert(model, args, policy=policy, backend=backend)


def loss_of(amp, x):
    return (amp(x).float() - x[:, :4]).square().mean()


def shadows_of(amp):
    return amp._graphs.shadows


def fused_sgd(amp):
    return torch.optim.SGD(amp.parameters(), 0.5, fused=True)


def adamw(amp):
    return torch.optim.AdamW(amp.parameters(), 0.1)


class ByHand:
    """Updates parameters in place, without an optimizer of torch."""

    def __init__(self, amp):
        self.parameters = [*amp.parameters()]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            parameter.sub_(parameter.grad, alpha=0.5)


def pipelined(make, **options):
    """Returns the gradients of a loop whose forward runs one step ahead of its backward."""
    _, amp = converted(**options)
    optimizer, pending, found = make(amp), [], []
    for x in X:
        pending.append(loss_of(amp, x))
        if len(pending) > 1:
            optimizer.zero_grad()
            pending.pop(0).backward()
            found += [p.grad.clone() for p in amp.parameters()]
            optimizer.step()
    return found


def assert_equal(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@BACKENDS
@CAPTURES
@pytest.mark.parametrize("make", [fused_sgd, adamw, ByHand])
def test_a_pipelined_loop_equals_one_whose_graphs_cast(make, args, backend):
    copies = pipelined(make, args=args, backend=backend)
    casts = pipelined(make, args=args, backend=backend, weight_copies=False)
    assert_equal(copies, casts)


@pytest.mark.parametrize("make", [fused_sgd, adamw])
def test_float16_with_the_scale_in_the_graph(make):
    def attached(amp):
        optimizer = make(amp)
        amp.scaler.attach(optimizer)
        return optimizer

    copies = pipelined(attached, dtype=torch.float16)
    assert_equal(copies, pipelined(attached, dtype=torch.float16, weight_copies=False))


@BACKENDS
def test_two_branches_with_an_optimizer_each(backend):
    """The second loss of a game: its forward ran before the first optimizer's step."""

    def gradients(**options):
        model, amp = converted(backend=backend, **options)
        first, second = (torch.optim.SGD(model[i].parameters(), 0.5, fused=True) for i in (0, 2))
        found = []
        for x in X:
            one, two = loss_of(amp, x), loss_of(amp, x + 1)
            model.zero_grad()
            one.backward()
            first.step()
            loss_of(amp, x).detach()  # refreshes
            two.backward()
            second.step()
            found += [p.grad.clone() for p in amp.parameters()]
        return found

    assert_equal(gradients(), gradients(weight_copies=False))


@BACKENDS
@functorch_config.patch(donated_buffer=False)  # else compiled graphs refuse retain_graph
def test_a_kept_graph_runs_again_after_a_step(backend):
    def gradients(**options):
        model, amp = converted(backend=backend, **options)
        optimizer, loss = fused_sgd(amp), loss_of(amp, X[0])
        loss.backward(retain_graph=True)
        optimizer.step()
        amp(X[1])
        model.zero_grad()
        loss.backward()
        return [p.grad for p in amp.parameters()]

    assert_equal(gradients(), gradients(weight_copies=False))


class Twice(nn.Module):
    """Returns two results. Each has its own backward."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x, y):
        return self.layers(x), self.layers(y)


def test_two_results_of_one_call():
    def gradients(**options):
        model = Twice()
        amp = ampgraph.convert(model, (X[0], X[1]), policy=Policy("O1", dtype=BF16, **options))
        optimizer, found = fused_sgd(amp), []
        for x in X:
            one, two = (result.float().square().mean() for result in amp(x, x + 1))
            one.backward()
            optimizer.step()
            amp(x, x)  # refreshes
            model.zero_grad()
            two.backward()
            found += [p.grad.clone() for p in amp.parameters()]
            optimizer.step()
        return found

    assert_equal(gradients(), gradients(weight_copies=False))


@BACKENDS
@CAPTURES
def test_frozen_weights_pass_gradients_to_inputs(args, backend):
    """A generator's loss through a discriminator that trains before the loss's backward."""

    def gradients(**options):
        model, amp = converted(args, backend, **options)
        optimizer, found = fused_sgd(amp), []
        for x in X:
            x = x.clone().requires_grad_()
            model.requires_grad_(False)
            loss = loss_of(amp, x)
            model.requires_grad_(True)
            loss_of(amp, x.detach()).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(amp, x.detach())  # refreshes
            loss.backward()
            found.append(x.grad)
        return found

    assert_equal(gradients(), gradients(weight_copies=False))


def test_an_output_that_is_kept_costs_one_exchange_of_copies():
    _, amp = converted()
    optimizer, shadows = fused_sgd(amp), shadows_of(amp)
    kept = amp(X[0])
    assert shadows.are_awaited()
    for x in X[:2]:
        loss_of(amp, x).backward()
        optimizer.step()
        amp(x)
    assert shadows.replaced == len([*amp.parameters()])  # once: the kept output holds the first copies
    del kept
    assert not shadows.are_awaited()


@BACKENDS
@CAPTURES
def test_an_ordinary_loop_keeps_its_copies_and_follows_nothing(args, backend):
    _, amp = converted(args, backend)
    optimizer, kept = adamw(amp), []
    for x in X:
        kept.append(loss_of(amp, x))  # with its graph, which is freed
        kept[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            amp(x)
    shadows = shadows_of(amp)
    assert shadows.replaced == 0
    assert not shadows.are_awaited()
    assert not shadows.pending._nodes


@BACKENDS
def test_calls_without_a_backward_are_forgotten(backend):
    _, amp = converted(backend=backend)
    for x in X:
        amp(x)
    gc.collect()
    assert not shadows_of(amp).pending._nodes
    assert not shadows_of(amp).are_awaited()


@BACKENDS
def test_what_is_awaited(backend):
    _, amp = converted(backend=backend)
    shadows = shadows_of(amp)
    with functorch_config.patch(donated_buffer=False):
        loss = loss_of(amp, X[0])
        assert shadows.are_awaited()
        loss.backward(retain_graph=True)
        assert shadows.are_awaited()
        loss.backward()
    assert not shadows.are_awaited()
    with torch.no_grad():
        kept = amp(X[0])
    assert not shadows.are_awaited()
    del kept


def test_a_compiled_step_runs_the_loop_while_a_backward_is_pending():
    def run(whole):
        model, amp = converted()
        optimizer = fused_sgd(amp)
        step = ampgraph.compile_step(amp, optimizer, loss_of)
        for x in X[:4]:
            step(x)
        loss = loss_of(amp, X[4])
        if whole:
            with pytest.warns(
                UserWarning, match=r"the backward of an earlier call of the model may still run"
            ):
                step(X[5])
            assert "may still run" in step.reason
        else:
            loss_of(amp, X[5]).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.clone() for p in amp.parameters()]
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for x in X[:4]:
                step(x)
        assert step.reason is None
        return gradients, copy.deepcopy(model.state_dict())

    (mine, after), (theirs, other) = run(whole=True), run(whole=False)
    assert_equal(mine, theirs)
    assert_equal(after.values(), other.values())
