"""Parts of a model may have the names of attributes of torch.fx, nn.Module or a converted model."""

import pytest
import torch
from torch import fx, nn

import ampgraph
from tests.helpers import close

X = torch.randn(3, 4)
KINDS = ("module", "parameter", "buffer", "attribute")


def linear(x, weight):
    return nn.functional.linear(x, weight)


class Holder(nn.Module):
    """Has parts with the given names, one of each kind in turn, and reads them all."""

    def __init__(self, names, shift=0):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.kinds = {}
        for i, name in enumerate(names):
            kind = KINDS[(i + shift) % 4]
            if hasattr(self, name):
                continue  # PyTorch refuses it
            self.kinds[name] = kind
            if kind == "module":
                self.add_module(name, nn.Linear(4, 4))
            elif kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.randn(4, 4) / 8))
            elif kind == "buffer":
                self.register_buffer(name, torch.randn(4, 4) / 8)
            else:
                setattr(self, name, 1.0 - i / 1000)

    def forward(self, x):
        total = self.fc(x)
        for name, kind in self.kinds.items():
            part = getattr(self, name)
            if kind == "module":
                total = total + part(x)
            elif kind == "attribute":
                total = total * part
            else:
                total = total + linear(x, part)
        return total


def own_names(thing):
    return sorted({*dir(thing), *vars(thing)})


def all_names():
    converted = ampgraph.convert(nn.Linear(4, 4), (X,))
    things = (fx.GraphModule(nn.Module(), fx.Graph()), nn.Module(), converted, converted.graph_module)
    names = {name for thing in things for name in own_names(thing) if not name.startswith("__")}
    later = {
        "shape_env",
        "_amp",
        "_shadows",
        "_source_model",
        "_constant_0",
        "_constant__0",
        "plan",
        "shadows",
    }
    return sorted(names - {"weight", "bias"} | later)


def converted(model, policy="O2", args=(X,), **options):
    low = torch.float16 if policy == "O2" else torch.bfloat16
    return ampgraph.convert(model, args, policy=policy, dtype=low, **options)


def check(model, amp):
    close(amp(X), model(X))
    assert list(amp.state_dict()) == list(model.state_dict())
    assert [id(p) for p in amp.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("shift", range(4))
def test_every_name_as_every_kind(shift):
    model = Holder(all_names(), shift)
    assert len(model.kinds) > 60
    amp = converted(model)
    check(model, amp)
    amp(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


COMMON = (
    "graph",
    "_graph",
    "code",
    "meta",
    "recompile",
    "print_readable",
    "policy",
    "plan",
    "scaler",
    "source",
)


@pytest.mark.parametrize("policy", ["O1", "O3"])
@pytest.mark.parametrize("shift", [0, 2])
def test_at_other_levels(policy, shift):
    model = Holder(COMMON, shift).eval()
    wanted = model(X)
    amp = converted(model, policy)
    close(amp(X), wanted)
    assert list(amp.state_dict()) == list(model.state_dict())


def test_just_in_time():
    model = Holder(COMMON)
    check(model, converted(model, args=None))


def test_in_blocks():
    model = nn.Sequential(Holder(COMMON, 1), nn.Linear(4, 4))
    keys, wanted = list(model.state_dict()), model(X)
    ampgraph.convert_blocks(model, "0", dtype=torch.float16)
    close(model(X), wanted)
    assert list(model.state_dict()) == keys


def test_in_an_exported_program():
    model = Holder(COMMON, 3)
    program = ampgraph.export(model, (X,), dtype=torch.bfloat16)
    assert set(program.state_dict) == set(model.state_dict())
    # torch's own module of a program fails for parts called graph or meta.
    model = Holder(["policy", "plan", "scaler", "source"])
    close(ampgraph.export(model, (X,), dtype=torch.bfloat16).module()(X), model(X))


@pytest.mark.parametrize("name", ["graph", "_graph", "code", "policy", "fc"])
def test_what_is_replaced_is_used(name):
    model = Holder(["graph", "code", name])
    amp = converted(model)
    model.fc = nn.Linear(4, 4)
    model.kinds = {"graph": "module", "code": "parameter"}
    model.code = nn.Parameter(torch.randn(4, 4))
    check(model, amp)


@pytest.mark.parametrize("name", ["policy", "plan", "scaler", "source", "options"])
def test_a_hidden_attribute_is_the_converted_models_own(name):
    model = Holder([name])
    part, amp = getattr(model, name), converted(model)
    assert getattr(amp, name) is not part
    assert getattr(amp.source, name) is part
    with pytest.raises(AttributeError, match=rf"set it on \.source: \.source\.{name} = "):
        setattr(amp, name, part)
    with pytest.raises(AttributeError, match=rf"\.source\.{name}"):
        delattr(amp, name)
    assert getattr(amp.source, name) is part


def test_in_explanations_and_pictures():
    amp = converted(Holder(COMMON))
    assert "graph" in str(ampgraph.explain(amp))
    assert ampgraph.to_networkx(amp).number_of_nodes() > len(COMMON)
