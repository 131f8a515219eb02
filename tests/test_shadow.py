"""Shadow weights: graphs read low copies of parameters, fresh after every update, never more often."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph
from ampgraph import Policy
from ampgraph.passes.read_shadows import MOST_IN_GROUP
from ampgraph.runtime.boundary import castable
from ampgraph.runtime.shadow_weights import ShadowWeights
from ampgraph.training.low_copies import shadow_weights

F16 = torch.float16
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("shared_captures")
CAPTURES = pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])


class Copies(TorchDispatchMode):
    """Counts what is cast: sizes of single tensors, and for grouped copies how many they copied."""

    def __init__(self):
        super().__init__()
        self.casts, self.refreshed = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.casts.append(tuple(args[0].shape))
        if func is torch.ops.aten._foreach_copy_.default:
            self.refreshed.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def small_model():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def converted(args=(X,), backend="eager", level="O2", **options):
    options = {"loss_scale": ampgraph.NoLossScale()} | options
    model = small_model()
    policy = ampgraph.Policy(level, dtype=F16, **options)
    return model, ampgraph.convert(model, args, policy=policy, backend=backend)


def fresh_output(model, level="O2"):
    """What a conversion made now computes."""
    with torch.no_grad():
        return ampgraph.convert(copy.deepcopy(model), (X,), policy=level, dtype=F16)(X)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_forward_casts_no_weight_and_accumulation_refreshes_once(level):
    _model, amp = converted(level=level)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp(X).sum().backward()
    optimizer.step()
    with Copies() as first:
        amp(X)
    with Copies() as second:
        amp(X).sum().backward()
        amp(X)
    assert first.refreshed == [4]  # two weights, two biases; the norm's parameters stay float32
    assert second.refreshed == []
    assert not {(16, 8), (4, 16)} & set(first.casts)


def test_only_float32_parameters_are_visible():
    model, amp = converted()
    amp(X).sum().backward()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in amp.parameters())
    assert amp.state_dict().keys() == small_model().state_dict().keys()
    assert sum(1 for _ in amp.parameters()) == len(set(map(id, model.parameters())))


def step(optimizer_class, **options):
    def update(model):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer_class(model.parameters(), lr=0.1, **options).step()

    return update


def edit_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def load(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def swap_average(model):
    average = AveragedModel(copy.deepcopy(model), avg_fn=lambda old, new, n: old * 0.5)
    average.update_parameters(model)
    average.update_parameters(model)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), average.parameters(), strict=True):
            parameter.copy_(other)


def replace_memory(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 3


def write_unseen_before_evaluation(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.25)
    model.eval()


def write_through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.25)


def set_data_in_the_same_memory(model):
    for parameter in model.parameters():
        memory = parameter.data
        parameter.data = torch.zeros(0)
        memory.mul_(0.25)
        parameter.data = memory


def write_through_data_of_a_state_dict(model):
    for value in model.state_dict().values():
        value.data.mul_(0.25)


UPDATES = {
    "through .data": write_through_data,
    "through .data of a state dict": write_through_data_of_a_state_dict,
    "same memory": set_data_in_the_same_memory,
    "SGD": step(torch.optim.SGD),
    "AdamW foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW fused": step(torch.optim.AdamW, fused=True),
    "edit in place": edit_in_place,
    "load_state_dict": load,
    "averaged weights": swap_average,
    "other memory": replace_memory,
    "through .data before evaluation": write_unseen_before_evaluation,
}


@CAPTURES
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(
    ("grad", "level"),
    [(True, "O1"), (True, "O2"), (False, "O2")],
    ids=["training at O1", "training", "no_grad"],
)
def test_fresh_after(name, grad, level, args):
    model, amp = converted(args, level=level)
    with torch.set_grad_enabled(grad):
        before = amp(X)
    UPDATES[name](model)
    with torch.set_grad_enabled(grad):
        after = amp(X)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.detach(), fresh_output(model, level), rtol=0, atol=0)


@CAPTURES
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_updates_by_hand_through_data_are_seen(level, args):
    """Such a write raises no counter: ``p.data.add_(p.grad, alpha=-lr)`` in a loop without an optimizer."""
    model, amp = converted(args, level=level)
    for _ in range(2):
        before = amp(X)
        before.square().mean().backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.5)
            parameter.grad = None
        with torch.no_grad():
            after = amp(X)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, fresh_output(model, level), rtol=0, atol=0)


COLLECTIVES = {
    "scatter": lambda target, source: dist.scatter(target, [source]),
    "all_to_all_single": dist.all_to_all_single,
    "all_gather_into_tensor": dist.all_gather_into_tensor,
    "reduce_scatter_tensor": dist.reduce_scatter_tensor,
    "reduce_scatter": lambda target, source: dist.reduce_scatter(target, [source]),
}


@CAPTURES
@pytest.mark.parametrize("name", COLLECTIVES)
def test_writes_by_collectives_are_seen(name, args):
    """``dist.broadcast(p, 0)`` raises no counter."""
    model, amp = converted(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp(X).sum().backward()
    optimizer.step()
    with torch.no_grad():
        before = amp(X)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for held in model.state_dict().values():  # the same memory, other tensors
            COLLECTIVES[name](held, held * 0.25)
    finally:
        dist.destroy_process_group()
    with torch.no_grad():
        after = amp(X)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, fresh_output(model), rtol=0, atol=0)


def test_compiled_code_calls_collectives():
    """The functions that count writes stay in the process, and Dynamo traces none of them."""
    _model, amp = converted()
    amp(X)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @torch.compile(backend="eager")
    def gathered(x):
        return torch.cat(dist.nn.functional.all_gather(x.relu())).sin()

    try:
        torch.testing.assert_close(gathered(X), X.relu().sin(), rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_reads_and_writes_data(backend):
    """The property that counts writes stays in the process; Dynamo traces it as torch's own."""
    _model, amp = converted()
    amp(X)
    target, source = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

    @torch.compile(backend=backend, fullgraph=True)
    def average():
        target.data.lerp_(source.data, 0.5)
        return target.data * 2

    average()
    assert torch.equal(average(), torch.full((4,), 1.5))
    assert torch.equal(target, torch.full((4,), 0.75))


def test_a_kept_state_dict_is_watched_until_it_is_gone():
    """Evaluation, in which nothing else refreshes the copies."""
    model, amp = converted()
    with torch.no_grad():
        amp(X)
        kept = model.state_dict()
        for _ in range(2):
            for value in kept.values():
                value.data.mul_(0.5)
            assert torch.equal(amp(X), fresh_output(model, "O2"))
        kept["0.weight"].data.mul_(0.5)
        del kept, value
        expected = fresh_output(model, "O2")
        assert torch.equal(amp(X), expected)
        with Copies() as copies:
            amp(X)
    assert copies.refreshed == []


def test_only_calls_with_gradients_make_later_ones_refresh():
    _model, amp = converted()
    for grad in (False, True, False):
        with torch.set_grad_enabled(grad):
            amp(X)
            with Copies() as copies:
                amp(X)
        assert copies.refreshed == ([4] if grad else [])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_without_copies_every_forward_casts(level):
    """With the values that copies have, in results and gradients."""
    model, amp = converted(level=level)
    casting = ampgraph.convert(model, (X,), policy=amp.policy.replace(weight_copies=False))
    results = [one(X) for one in (casting, amp)]
    with Copies() as copies, torch.no_grad():
        casting(X)
        amp(X)
    assert copies.casts.count((16, 8)) == 1
    gradients = [torch.autograd.grad(r.square().mean(), list(model.parameters())) for r in results]
    assert torch.equal(*results)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


class Interrupt(TorchDispatchMode):
    """Interrupts before grouped copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_copy_.default:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [True, False])
def test_an_interrupted_refresh_runs_again(fused):
    model, amp = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    amp(X).sum().backward()
    optimizer.step()
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt), Interrupt():
            amp(X)
        assert torch.equal(amp(X), fresh_output(model))


def test_state_and_copies_of_the_model_have_no_low_copies():
    model, amp = converted(level="O1")
    amp(X).sum().backward()
    again = copy.deepcopy(amp)
    assert again.state_dict().keys() == amp.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        again.source[0].weight.zero_()
        assert torch.equal(amp(X), fresh_output(model, "O1"))
        assert torch.equal(again(X), fresh_output(again.source, "O1"))


def test_just_in_time_copies_are_no_inputs_that_gradients_reach(recwarn):
    """They are float16, and a loss scale warns of float16 inputs."""
    _model, amp = converted(args=None, level="O1", loss_scale=None)
    amp(X).sum().backward()
    assert not [w for w in recwarn if "float16" in str(w.message)]


@CAPTURES
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients_are_those_of_casts_in_the_graph(backend, args):
    model, amp = converted(args, backend)
    reference, other = converted()
    reference.load_state_dict(model.state_dict())
    amp(X).square().mean().backward()
    other.graph_module(X).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        tolerance = 0 if backend != "inductor" else 2e-3  # it fuses across roundings
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance / 10)


@CAPTURES
def test_copies_are_no_inputs_with_gradients_in_float16(args, recwarn):
    _model, amp = converted(args, loss_scale=ampgraph.DynamicLossScale())
    amp(X).sum().backward()
    assert [str(w.message) for w in recwarn if "float16" in str(w.message)] == []


def test_a_skipped_step_changes_no_shadow():
    _model, amp = converted(loss_scale=ampgraph.DynamicLossScale(init_scale=8.0))
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before = amp(X)
    (amp(X) * torch.inf).sum().backward()
    optimizer.step()
    assert torch.equal(before, amp(X))


def test_backward_after_an_update_fails_as_in_the_source():
    model, amp = converted()
    loss = amp(X).square().mean()
    edit_in_place(model)
    amp(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_validation_between_forward_and_backward():
    model, amp = converted()
    loss = amp(X).square().mean()
    amp.eval()
    amp(X)
    amp.train()
    amp(X)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_first_call_in_inference_mode_then_training():
    _, amp = converted()
    with torch.inference_mode():
        amp(X)
    amp(X).sum().backward()


def test_a_parameter_replaced_later_is_cast_in_the_graph():
    model, amp = converted()
    model[0].weight = nn.Parameter(torch.randn(16, 8))
    with Copies() as copies:
        amp(X)
        model[0].weight.data.mul_(2)
        second = amp(X)
    assert copies.casts.count((16, 8)) == 2
    torch.testing.assert_close(second.detach(), fresh_output(model), rtol=0, atol=0)


def low_copies(amp):
    """The low copies that the model keeps, also those that no graph reads."""
    copies = vars(amp._graphs.shadows).values()
    return [x for x in copies if isinstance(x, torch.Tensor)]


@CAPTURES
def test_the_copy_of_a_parameter_that_is_gone_is_freed(args):
    model, amp = converted(args)
    for _ in range(3):
        amp(X).sum().backward()
        model[0].weight = nn.Parameter(torch.randn(16, 8))
    amp(X).sum().backward()
    sizes = [tuple(copy.shape) for copy in low_copies(amp)]
    assert sizes.count((16, 8)) == (args is None)  # just in time, a graph reads a copy of the new weight
    assert sorted(set(sizes)) == [(4,), (4, 16), (16,)] + [(16, 8)] * (args is None)


def test_a_call_that_began_before_a_parameter_was_replaced_ends_well():
    """Another thread replaces a weight after the call has found its graph."""
    model, amp = converted()
    gc.collect()  # a closure of torch.export may hold the weight, and the call its copy
    with torch.no_grad():
        amp(X)
        found = amp._graphs.find_for_run((X,), {})
        model[0].weight = nn.Parameter(torch.randn(16, 8))
        now = amp(X)
        with amp._graphs.lock:
            late = found.captured.run((X,), {}, found.is_in_place)
    torch.testing.assert_close(late, now, rtol=0, atol=0)


def test_parameters_that_are_lent_at_an_exchange_have_no_low_copies():
    """``fully_shard`` lends parameters in memory that it writes again without a sign."""
    model, amp = converted()
    amp(X)
    model[2] = nn.LayerNorm(16)
    lent = {name: nn.Parameter(2 * p.detach()) for name, p in model.named_parameters()}
    for _ in range(2):
        torch.func.functional_call(amp, lent, (X,))
    assert not any(amp._graphs.shadows.accepts(p) for p in lent.values())
    with torch.no_grad():
        torch.testing.assert_close(amp(X), fresh_output(model), rtol=0, atol=0)


def test_a_parameter_that_takes_the_address_of_another_is_read():
    """Python gives the memory of a deleted object to the next one of its size."""
    model, amp = converted()
    with torch.no_grad():
        amp(X)
        address, values = id(model[3].bias), torch.full((4,), 50.0)
        del model[3].bias
        others = [nn.Parameter(values)]
        while id(others[-1]) != address and len(others) < 10_000:
            others.append(nn.Parameter(values))
        model[3].bias = others[-1]
        assert id(model[3].bias) == address
        assert (amp(X) - values).abs().max() < 10.0


def test_gradients_of_several_forwards_are_summed_in_float32():
    """A sum in float16 would lose the small gradient next to the large one."""
    model, amp = converted()
    bias = model[3].bias
    for large, small in ((1024.0, 0.25), (0.25, 1024.0)):
        losses = amp(X[:1]).sum() * large, amp(X[:1]).sum() * small
        (losses[0] + losses[1]).backward()
        assert torch.equal(bias.grad, torch.full_like(bias, 1024.25))
        amp(X[:1]).sum().backward()
        assert torch.equal(bias.grad, torch.full_like(bias, 1025.25))
        bias.grad = None


@CAPTURES
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", ["its own parameters", "others"])
def test_functional_call_reads_what_it_is_given(first, level, args):
    model, policy = small_model(), ampgraph.Policy(level, dtype=F16)
    amp = ampgraph.convert(model, args, policy=policy)
    if first == "its own parameters":
        amp(X)
    given = {name: (p.detach() * 0.5).requires_grad_() for name, p in model.named_parameters()}
    for _ in range(2):
        out = torch.func.functional_call(amp, given, (X,))
        gradients = torch.autograd.grad(out.square().mean(), list(given.values()))
        before = copy.deepcopy(model)
        before.load_state_dict({name: p.detach() for name, p in given.items()})
        reference = ampgraph.convert(before, (X,), policy=policy)
        expected = reference(X)
        expected.square().mean().backward()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        for mine, theirs in zip(gradients, before.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.grad, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(amp(X), ampgraph.convert(model, (X,), policy=policy)(X), rtol=0, atol=0)


def test_repeated_layers_of_one_compiled_frame_read_their_own_shadows():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = self.one(layer, x)
            return x

        def one(self, layer, x):
            torch._dynamo.graph_break()
            return layer(x).relu()

    model = Repeated()
    amp = ampgraph.convert(model, policy="O2", dtype=F16, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(amp(X), model(X), rtol=5e-3, atol=5e-3)
        edit_in_place(model)
        torch.testing.assert_close(amp(X), model(X), rtol=5e-3, atol=5e-3)


def test_torch_compile_backend_has_them_too():
    model = small_model()
    options = {"level": "O2", "dtype": F16, "backend": "eager"}
    compiled = torch.compile(model, backend="ampgraph", options=options)
    before = compiled(X)
    edit_in_place(model)
    assert not torch.equal(before, compiled(X))
    torch.testing.assert_close(compiled(X).detach(), fresh_output(model), rtol=0, atol=0)


def test_graphs_that_run_read_shadows_and_the_planned_graph_stands_alone():
    _, amp = converted()
    amp(X)
    assert "shadow_weight" in amp.training_graph.code
    assert "_shadows.weight_0" in amp.inference_graph.code
    assert "shadow" not in amp.graph_module.code


def test_a_copy_of_another_size_follows_later_updates():
    model = nn.Linear(3, 2)
    shadows = ShadowWeights(model, F16)
    shadows.names_of([model.weight, model.bias])
    model.weight.data = torch.ones(4, 3)
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        shadows.refresh()
        assert torch.equal(shadows.of(model.weight), torch.full((4, 3), value, dtype=F16))
    assert torch.equal(shadows.of(model.bias), model.bias.to(F16))


def test_copies_are_fresh_after_the_parameter_of_another_is_gone():
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    shadows = ShadowWeights(nn.Sequential(first, second), F16)
    shadows.names_of([first.weight, second.weight])
    del first.weight
    for value in (1.0, 2.0):
        with torch.no_grad():
            second.weight.fill_(value)
        shadows.refresh()
        assert torch.equal(shadows.of(second.weight), torch.full((2, 2), value, dtype=F16))
    assert len(shadows.pairs()) == 1


def test_moving_the_model_moves_the_shadows():
    _model, amp = converted()
    amp(X)
    amp.to("meta")
    assert amp(X.to("meta")).device.type == "meta"


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(q @ k.transpose(0, 1) @ v)


@CAPTURES
def test_sizes_of_shadows_are_constants_to_a_compiler(args):
    """The backward of ``chunk`` asks for them, long after Dynamo made its guards."""
    model = Split()
    ampgraph.convert(model, args, policy="O2", dtype=torch.bfloat16, backend="aot_eager")(X).sum().backward()
    assert model.qkv.weight.grad is not None


class Bounded(nn.Module):
    """Brings a parameter into bounds in its own forward, as embeddings with ``max_norm`` do."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(8, 8, max_norm=0.1), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.table(x.argsort(-1)))


@pytest.mark.parametrize("level", ["O2", "O3"])
@CAPTURES
def test_a_parameter_that_the_model_writes_is_cast_in_the_graph(args, level):
    model = Bounded().eval()
    source = copy.deepcopy(model)
    amp = ampgraph.convert(model, args, policy=level, dtype=F16)
    with torch.no_grad():
        torch.testing.assert_close(amp(X), source(X), rtol=0.0, atol=2e-3)


class Several(nn.Module):
    """More weights than one group has, a frozen one, one that no gradient reaches, and one with two uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(MOST_IN_GROUP)])
        self.aside, self.frozen, self.tied = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.tied(self.frozen(self.tied(x)))
        for layer in self.layers:
            x = x + layer(x)
        return x, self.aside(x).detach()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_groups_of_weights_have_the_gradients_of_casts_in_the_graph(backend):
    torch.manual_seed(0)
    model = Several()
    amp = ampgraph.convert(model, (X,), policy="O2", dtype=torch.bfloat16, backend=backend)
    amp(X)[0].square().mean().backward()
    calls = [n for n in amp.training_graph.graph.nodes if n.target is shadow_weights]
    weights = [len(n.args) // 2 for n in calls]
    assert sorted(weights) == [1, 1, 4, MOST_IN_GROUP, MOST_IN_GROUP]
    mine = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    amp.graph_module(X)[0].square().mean().backward()
    assert mine["aside.weight"] is None
    assert mine["frozen.weight"] is None
    for name, parameter in model.named_parameters():
        assert (mine[name] is None) == (parameter.grad is None), name
        assert parameter.grad is None or torch.equal(mine[name], parameter.grad), name


def test_one_gradient_of_a_group_and_second_derivatives():
    model, amp = converted()
    weight = model[0].weight
    for function in (amp, amp.graph_module):
        loss = function(X).square().mean()
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)
        results = [first.detach(), *(g for g in second if g is not None)]
        if function is amp:
            expected = results
    for mine, theirs in zip(expected, results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_freezing_a_weight_between_calls():
    model, amp = converted()
    amp(X).sum().backward()
    model.zero_grad()
    model[0].requires_grad_(False)
    amp(X).sum().backward()
    assert model[0].weight.grad is None
    assert model[3].weight.grad is not None
    model[0].requires_grad_(True)
    amp(X).sum().backward()
    assert model[0].weight.grad is not None


def test_compiled_training_copies_no_weight_that_a_fused_kernel_casts() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
            self.mixed, self.over = nn.Parameter(torch.ones(8, 8)), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x) * self.scale.view(1, 8)
            return self.over(torch.matmul(x, self.mixed).view(2, 2, 8).transpose(0, 2))

    expected = {"eager": 6, "aot_eager": 4}
    for backend, count in expected.items():
        model, x = Scaled(), torch.randn(4, 8)
        amp = ampgraph.convert(model, (x,), policy="O2", dtype=torch.bfloat16, backend=backend)
        amp(x).sum().backward()
        names = {id(p): name for name, p in model.named_parameters()}
        pairs = amp._graphs.shadows.pairs()
        copied = sorted(names[id(master)] for _, master in pairs)
        assert len(copied) == count, copied
        assert {"layer.bias", "layer.weight", "mixed", "over.weight"} <= {*copied}


@pytest.mark.parametrize(
    ("layout", "copied"),
    [(torch.contiguous_format, ["2.weight"]), (torch.channels_last, ["0.weight", "1.weight", "2.weight"])],
)
def test_compiled_training_copies_convolutions_with_neighbouring_channels(layout, copied):
    layers = nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 8, 1)
    model = nn.Sequential(*layers).to(memory_format=layout)
    x = torch.randn(2, 4, 6, 6).to(memory_format=layout)
    amp = ampgraph.convert(model, (x,), policy=Policy(dtype=torch.bfloat16, objective="fused"))
    sources = {node.name: node.target for node in amp.graph_module.graph.find_nodes(op="get_attr")}
    found = [sources[name] for name in castable(amp.graph_module.graph, casts_fuse=True) if name in sources]
    assert [name for name in found if name.endswith("weight")] == copied


@CAPTURES
@pytest.mark.parametrize("is_shared_first", [False, True])
def test_weights_that_processes_share_are_copied_at_every_call(is_shared_first, args):
    """Hogwild: another process writes them, which nothing in this one shows."""
    model = small_model()
    if is_shared_first:
        model.share_memory()
    policy = Policy("O2", dtype=F16, loss_scale=ampgraph.NoLossScale())
    amp = ampgraph.convert(model, args, policy=policy, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp(X).sum().backward()
    optimizer.step()
    model.share_memory()
    with torch.no_grad():
        before = amp(X)
        for parameter in model.parameters():
            other = torch.frombuffer(parameter.detach().numpy(), dtype=torch.float32)  # no counter sees it
            other.mul_(0.25)
        after = amp(X)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, fresh_output(model), rtol=0, atol=0)


@CAPTURES
def test_parameters_of_one_memory_are_copied_at_every_call(args):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    amp = ampgraph.convert(model, args, policy=Policy("O2", dtype=F16), backend="eager")
    with torch.no_grad():
        amp(X)
        model[2].weight.data = model[0].weight.data
        for _ in range(3):
            torch.testing.assert_close(amp(X), fresh_output(model), rtol=0, atol=0)
            model[0].weight.mul_(-0.5)
