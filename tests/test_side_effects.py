"""What forward does besides returning a value, and what is done to a model after it was converted."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves

import ampgraph
from ampgraph.capture.reads import Reads
from tests.helpers import close

LOW = {"policy": "O1", "dtype": torch.bfloat16}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@dataclass
class Memory:
    keys: list


torch.export.register_dataclass(Memory)


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.fc, self.write = nn.Linear(8, 8), write

    def forward(self, x, held):
        y = self.fc(x)
        self.write(held, y)
        return y


WRITES = {
    "a dict": (lambda held, y: held.update(k=y), dict),
    "another value": (lambda held, y: held.update(k=held["k"] + y), lambda: {"k": torch.ones(4, 8)}),
    "a list": (lambda held, y: held.append(y), list),
    "a list in a dict": (lambda held, y: held["k"].append(y), lambda: {"k": []}),
    "a dataclass": (lambda held, y: held.keys.append(y), lambda: Memory([])),
    "a number": (lambda held, y: held.update(n=held["n"] + 1), lambda: {"n": 0}),
    "taken out": (lambda held, y: held.pop("k"), lambda: {"k": torch.ones(4, 8)}),
}


def leaves_of(held):
    return torch.utils._pytree.tree_leaves(held)


@pytest.mark.parametrize("what", WRITES)
@torch.no_grad()
def test_a_container_that_forward_writes_is_written(what):
    write, make = WRITES[what]
    model = Writes(write)
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    with pytest.warns(UserWarning, match=r"Writes: forward changes what its argument 'held' holds.*just in"):
        amp = ampgraph.convert(model, (X, make()), **LOW)
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    wanted, got = make(), make()
    model(X, wanted), amp(X, held=got)
    assert len(leaves_of(got)) == len(leaves_of(wanted))
    for a, b in zip(leaves_of(got), leaves_of(wanted), strict=True):
        if isinstance(a, torch.Tensor):
            close(a, b)
        else:
            assert a == b


def test_a_container_that_forward_writes_is_refused_ahead_of_time():
    model = Writes(lambda held, y: held.append(y))
    for name, capture in (("convert", {"capture": "ahead of time"}), ("export", {})):
        with pytest.raises(ampgraph.CaptureError, match="argument 'held' holds"):
            getattr(ampgraph, name)(model, (X, []), **LOW, **capture)


def test_a_container_that_forward_reads_is_no_reason(recwarn):
    model = Writes(lambda held, y: [*held["k"], y, dict(held).pop("n")])
    held = {"k": [torch.ones(4, 8)], "n": 1}
    amp = ampgraph.convert(model, (X, held), **LOW)
    close(amp(X, held), model(X, held))
    assert not amp.is_just_in_time
    assert not of_ampgraph(recwarn)


def test_a_tensor_in_a_container_that_forward_writes_in_place():
    model = Writes(lambda held, y: held["k"].add_(1))
    amp = ampgraph.convert(model, (X, {"k": torch.zeros(3)}), **LOW)
    held = {"k": torch.zeros(3)}
    amp(X, held)
    assert not amp.is_just_in_time
    assert held["k"].tolist() == [1, 1, 1]


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.inner = nn.Linear(8, 8), nn.Identity()

    def forward(self, x):
        self.last = self.inner.last = self.fc(x)
        return self.last * 2


@pytest.mark.parametrize("way", ["convert", "export"])
def test_no_value_of_a_capture_is_left_on_the_model(way):
    model = Keeps()
    before = set(vars(model)), set(vars(model.inner))
    with pytest.warns(UserWarning, match=r"^Keeps: forward sets [inerlast., ]+\. A") as told:
        getattr(ampgraph, way)(model, (X,), **LOW)
    assert [w.filename for w in told if w.category is UserWarning] == [__file__]
    assert (set(vars(model)), set(vars(model.inner))) == before


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def check_same(amp, model):
    for m in (amp, model):
        m.zero_grad()
    got, wanted = amp(X), model(X)
    close(got, wanted)
    got.sum().backward(), wanted.sum().backward()
    for a, b in zip(amp.parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            close(a.grad, b.grad)


@pytest.mark.parametrize("capture", ["auto", "just in time"])
@pytest.mark.parametrize("path", ["0", ""])
def test_a_forward_that_is_replaced_runs(path, capture):
    model = layers()
    amp = ampgraph.convert(model, (X,), capture=capture, **LOW)
    check_same(amp, copy.deepcopy(model))
    changed = model.get_submodule(path)
    inner = model[2]
    changed.forward = lambda x: inner(x) * 3
    wanted = amp(X)
    with torch.no_grad():
        close(wanted, model(X))
    del changed.forward
    with torch.no_grad():
        close(amp(X), model(X))


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, y: y * 4),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 4,)),
    "full backward": lambda m: m.register_full_backward_hook(
        lambda m, gi, go: tuple(None if g is None else g * 4 for g in gi)
    ),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, go: (go[0] * 4,)),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:Sequential.* it is captured just in time instead")
@pytest.mark.parametrize("capture", ["auto", "just in time"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_comes_or_goes_is_seen(kind, capture):
    model, plain = layers(), layers()
    amp = ampgraph.convert(model, (X,), capture=capture, **LOW)
    check_same(amp, plain)
    handles = [HOOKS[kind](m[2]) for m in (model, plain)]
    check_same(amp, plain)
    more = [HOOKS[kind](m[2]) for m in (model, plain)]
    check_same(amp, plain)
    for pair in (handles, more):
        for handle in pair:
            handle.remove()
        check_same(amp, plain)


def test_a_hook_elsewhere_captures_nothing_again():
    model = layers()
    amp = ampgraph.convert(model, (X,), **LOW)
    before = amp.graph_module
    HOOKS["forward"](layers()[0])
    amp(X).sum().register_hook(lambda grad: None)
    amp(X)
    assert amp.graph_module is before


class HooksItself(nn.Module):
    """Installs a hook at its first call, and notes that in an attribute."""

    def __init__(self):
        super().__init__()
        self.fc, self.cache = nn.Linear(8, 8), None
        self.seen = []

    def forward(self, x):
        if not hasattr(self, "hooked"):
            self.fc.register_forward_hook(lambda module, args, result: self.seen.append(result))
            self.table = torch.ones(8)
            self.cache = nn.Identity()
            self.hooked = True
        self.seen = []
        y = self.cache(self.fc(x)) * self.table
        return y, torch.stack(self.seen).sum(0)


def test_hooks_that_forward_installs_are_installed_once():
    model = HooksItself()
    amp = ampgraph.convert(model, (X,), **LOW)
    for other in (X, X[:2], X[:3]):  # captured again for other sizes
        y, seen = amp(other)
        close(seen, y)
    assert not model.fc._forward_hooks
    assert model.cache is None
    assert not hasattr(model, "table")
    y, seen = model(X)
    close(seen, y)
    assert len(model.fc._forward_hooks) == 1
    close(amp(X)[1], y)


GLOBAL_HOOKS = {
    "forward": lambda note: module_hooks.register_module_forward_hook(lambda m, args, y: note(m) or y * 4),
    "forward pre": lambda note: module_hooks.register_module_forward_pre_hook(lambda m, args: note(m)),
    "backward": lambda note: module_hooks.register_module_full_backward_hook(lambda m, gi, go: note(m)),
    "backward pre": lambda note: module_hooks.register_module_full_backward_pre_hook(lambda m, go: note(m)),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("capture", ["auto", "just in time"])
@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_hooks_for_all_modules_see_the_converted_model_alone_and_that_is_told(
    kind, capture, backend, recwarn
):
    model, x, seen = layers(), X.clone().requires_grad_(), []
    amp = ampgraph.convert(model, (x,), capture=capture, backend=backend, **LOW)
    amp(x)
    assert not of_ampgraph(recwarn)
    wanted = model(x)
    handle = GLOBAL_HOOKS[kind](seen.append)
    try:
        later = ampgraph.convert(model, (x,), capture=capture, backend=backend, **LOW)
        for converted in (amp, later):
            for _ in range(2):
                seen.clear()
                out = converted(x)
                out.sum().backward()
                assert seen == [converted]
                close(out, wanted * 4 if kind == "forward" else wanted)
        model(x).sum().backward()
        assert len(seen) == 1 + 4  # torch has them all still
    finally:
        handle.remove()
    assert sum("see a converted model as one module" in str(w.message) for w in recwarn) == 1  # of one line
    close(amp(x), wanted)
    assert amp.is_just_in_time or len(amp.graph_modules) == 1


def test_a_flop_counter_around_a_converted_model():
    model = layers()
    amp = ampgraph.convert(model, (X,), **LOW)
    counts = []
    for m in (model, amp):
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            m(X)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


class Held:
    def __init__(self):
        self.calls, self.last, self.size = 0, None, 0


class KeepsInAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.state = nn.Linear(8, 8), Held()

    def forward(self, x):
        y = self.fc(x)
        self.state.last, self.state.size, self.state.new = y, x.shape[0], [y]
        return y


def test_an_object_that_forward_sets_keeps_no_value_of_a_capture():
    model = KeepsInAnObject()
    with pytest.warns(UserWarning, match=r"forward sets state\.last.*state\.new.*sets no attributes"):
        amp = ampgraph.convert(model, (X,), **LOW, dynamic_shapes=({0: torch.export.Dim("n")},))
    assert (model.state.calls, model.state.last, model.state.size) == (0, None, 0)
    assert not hasattr(model.state, "new")
    close(amp(X), model(X))
    assert model.state.size == 4


def test_an_object_that_forward_leaves_alone_is_no_reason_to_warn(recwarn):
    model = KeepsInAnObject()
    model.forward = lambda x: model.fc(x) * (1 + model.state.calls)
    ampgraph.convert(model, (X,), **LOW)
    assert not [w for w in recwarn if "forward sets" in str(w.message)]


def of_ampgraph(recwarn):
    return [str(w.message) for w in recwarn if w.category is UserWarning]


LAYERS_WITH_STATE = {
    "LSTM": lambda: nn.LSTM(8, 8, 2, bidirectional=True),
    "GRU": lambda: nn.GRU(8, 8),
    "RNN": lambda: nn.RNN(8, 8),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.LSTM(8, 8), "weight_hh_l0"),
}


@pytest.mark.parametrize("way", ["convert", "export"])
@pytest.mark.parametrize("layer", LAYERS_WITH_STATE)
def test_state_that_torchs_own_layers_keep_is_no_reason_to_warn(layer, way, recwarn):
    model = LAYERS_WITH_STATE[layer]()
    before = set(vars(model))
    getattr(ampgraph, way)(model, (X,), **LOW)
    assert not of_ampgraph(recwarn)
    assert set(vars(model)) == before


WEIGHTS_OF_HOOKS = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("hook", WEIGHTS_OF_HOOKS)
def test_weights_that_hooks_of_torch_set_are_told_and_stay_current_just_in_time(hook):
    """The next pruning reads the weight that the hook set at the last call."""
    layers = [WEIGHTS_OF_HOOKS[hook](nn.Linear(8, 8)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    with pytest.warns(UserWarning, match="forward sets weight"):
        ampgraph.convert(layers[0], (X,), policy="O0")
    plain, amp = layers[0], ampgraph.convert(layers[1], policy="O0")
    for layer in (plain, layers[1]):
        with torch.no_grad():
            layer.weight_orig.mul_(2)
            layer.weight_orig[0] += 1
    plain(X), amp(X)
    assert layers[1].weight.equal(plain.weight)


def test_state_that_a_users_hook_sets_on_torchs_layer_is_told():
    model = nn.Linear(8, 8)
    model.register_forward_hook(lambda module, args, y: setattr(module, "seen", y))
    with pytest.warns(UserWarning, match="forward sets seen"):
        ampgraph.convert(model, (X,), **LOW)


class Decides(nn.Module):
    """Settles at its first call how to act, in itself and in an object."""

    def __init__(self, doubles):
        super().__init__()
        self.fc, self.state, self.kind, self.doubles = nn.Linear(8, 8), Held(), None, doubles

    def forward(self, x):
        if self.kind is None:
            self.kind = "mean"
        if self.state.last is None:
            self.state.last = "squared"
            x = x * 2 if self.doubles else x
        y = self.fc(x).square() if self.state.last == "squared" else self.fc(x)
        return y.mean() if self.kind == "mean" else y.sum()


def test_a_decision_that_each_call_would_make_again_is_no_reason_to_warn(recwarn):
    model = Decides(doubles=False)
    amp = ampgraph.convert(model, (X,), **LOW)
    assert not of_ampgraph(recwarn)
    close(amp(X), model(X))
    assert len(amp.graph_modules) <= 2  # the source has decided meanwhile
    model.kind = model.state.last = "sum"
    close(amp(X), model(X))


def test_a_decision_that_changes_what_the_next_call_computes_is_told():
    with pytest.warns(UserWarning, match="forward (sets|reads)") as told:
        ampgraph.convert(Decides(doubles=True), (X,), **LOW)
    assert sum("state.last" in str(w.message) for w in told) == 1
    assert sum("reads kind and sets it" in str(w.message) for w in told) == 1


TOTAL = torch.zeros(4)


class WritesItsOwn(nn.Module):
    """Writes in place to a tensor that is no buffer."""

    def __init__(self, write):
        super().__init__()
        self.fc, self.write = nn.Linear(4, 4), write
        self.total, self.held = torch.zeros(4), {"a": [torch.zeros(4)]}
        self.steps = torch.tensor(0)

    def forward(self, x):
        y = self.fc(x)
        return y + self.write(self)


def _adds(model):
    model.total += 1
    return model.total


def _adds_in_a_container(model):
    return model.held["a"][0].add_(1)


def _sets_an_item(model):
    model.total[1] = model.total[0] + 2
    return model.total


def _writes_out(model):
    return torch.add(model.total, 1, out=model.total)


def _counts(model):
    model.steps.add_(1)
    return model.steps * 0.5


def _adds_to_a_global(model):
    return TOTAL.add_(1)


OWN_WRITES = [_adds, _adds_in_a_container, _sets_an_item, _writes_out, _counts, _adds_to_a_global]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("write", OWN_WRITES)
def test_a_capture_writes_to_no_tensor_of_the_user(write, level, backend):
    source = WritesItsOwn(write)
    twin, x = copy.deepcopy(source), torch.randn(3, 4)
    TOTAL.zero_()
    amp = ampgraph.convert(source, (x,), policy=level, dtype=torch.bfloat16, backend=backend)
    actual = [amp(batch).detach() for batch in (x, x[:2], x)]
    TOTAL.zero_()
    for result, batch in zip(actual, (x, x[:2], x), strict=True):
        close(result, twin(batch))


HELD = {"list": [torch.ones(4)], "deep": {"a": [torch.ones(4), torch.zeros(4)]}}


class Keeper:
    def __init__(self):
        self.values = [torch.ones(4)]


class Replaces(nn.Module):
    """Replaces tensors that are neither parameters nor buffers."""

    def __init__(self, replace):
        super().__init__()
        self.fc, self.replace = nn.Linear(4, 4), replace
        self.table, self.keeper = torch.ones(4), Keeper()

    def forward(self, x):
        return self.fc(x) + self.replace(self)


def _item_of_a_global(model):
    HELD["list"][0] = HELD["list"][0] * 2
    return HELD["list"][0]


def _item_deep_inside(model):
    HELD["deep"]["a"][1] = HELD["deep"]["a"][1] + 1
    return HELD["deep"]["a"][1]


def _item_of_an_object(model):
    model.keeper.values[0] = model.keeper.values[0] * 2
    return model.keeper.values[0]


def _data(model):
    model.table.data = model.table.data * 2
    return model.table


def _gradient(model):
    model.table.grad = torch.ones(4)
    return model.table * 2


def _seed(model):
    torch.manual_seed(3)
    return torch.rand(4)


REPLACES = [_item_of_a_global, _item_deep_inside, _item_of_an_object, _data, _gradient, _seed]


@pytest.mark.parametrize("capture", ["auto", "ahead of time"])
@pytest.mark.parametrize("replace", REPLACES)
def test_a_capture_leaves_the_users_tensors_as_they_are(replace, capture):
    model = Replaces(replace)
    before = copy.deepcopy((HELD, vars(model.keeper), model.table))
    x = torch.randn(2, 4)
    drawn = torch.get_rng_state()
    try:
        ampgraph.convert(model, (x,), capture=capture, policy="O0")
    except ampgraph.CaptureError:
        assert capture == "ahead of time"
    held = HELD, vars(model.keeper), model.table
    for actual, expected in zip(tree_leaves(held), tree_leaves(before), strict=True):
        assert torch.equal(actual, expected)
    assert model.table.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)


class SetsNumbers(nn.Module):
    """As the heads of YOLO do: a stride for the loss, which reads it."""

    def __init__(self):
        super().__init__()
        self.fc, self.stride, self.same, self.mode = nn.Linear(8, 8), None, 3, ""

    def forward(self, x):
        self.stride, self.same, self.mode, self.width = 32 // x.shape[0], 3, "train", x.shape[1]
        return self.fc(x) / self.width


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_number_that_forward_sets_warns(is_dynamic):
    shapes = {"dynamic_shapes": ({0: torch.export.Dim("n")},)} if is_dynamic else {}
    model = SetsNumbers()
    with pytest.warns(UserWarning, match=r"^SetsNumbers: forward sets stride\. A captured graph sets no"):
        amp = ampgraph.convert(model, (X,), **LOW, **shapes)
    close(amp(X), model(X))
    assert model.stride == 32 // len(X)


@pytest.mark.parametrize("model", [nn.LSTM(4, 4), nn.Sequential(nn.Identity(), nn.GRU(4, 4))])
def test_the_list_of_weights_of_a_recurrent_layer_is_torchs(model):
    """``torch.export`` tells of it in Demucs: the list follows the parameters that it exchanges."""
    reads = Reads(model)
    (name,) = (name for name, module in model.named_modules() if isinstance(module, nn.RNNBase))
    reads.note_only_set([f"{name}._flat_weights".lstrip("."), "other"], {})
    assert reads.set_by_forward() == ["other"]
