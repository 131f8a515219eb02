"""Input that nobody vouches for: policy files, models on the command line, names in pictures and pages."""

from __future__ import annotations

import contextlib
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ampgraph
from ampgraph import OpLists, Policy, PolicyError
from ampgraph.cli.main import main

from .test_policy_file import POLICIES

NAME = "</title><script>alert(1)</script>\"'`|\\N\\\\{}<b>&\x1b[31m\x07\u202e{{x}}%s"

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(
    [*Policy().to_dict(), "type", "static", "dynamic", "value", "preset", "white", "black", "aten.gelu", "O1",
     "float16", "low", "fp32", "torch", "init_scale", "growth_interval", "traffic", "optimal"]
)  # fmt: skip
DATA = st.recursive(
    SCALARS | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


# -- policy files -----------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from([*Policy().to_dict()]), DATA, max_size=4) | DATA)
def test_any_json_is_a_policy_or_a_policy_error(data):
    with contextlib.suppress(PolicyError):
        assert isinstance(Policy.from_json(json.dumps(data)), Policy)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(POLICIES), st.sampled_from([*Policy().to_dict()]), DATA)
def test_a_policy_with_one_value_spoilt(policy, key, value):
    with contextlib.suppress(PolicyError):
        spoilt = Policy.from_dict({**policy.to_dict(), key: value})
        assert Policy.from_json(spoilt.to_json()) == spoilt


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"rules": ' * 5_000 + "1" + "}" * 5_000,
        '{"loss_scale": {"type": []}}',
        '{"loss_scale": {"type": "static", "value": 1e999}}',
        '{"loss_scale": {"type": "dynamic", "growth_interval": ' + "9" * 5_000 + "}}",
        '{"level": {"__class__": "os.system"}}',
        '{"dtype": "__class__"}',
        '{"ops": {"black": ["os.system"]}}',
        '{"ops": {"black": ["aten.__class__"]}}',
        "\x00",
        "",
    ],
    ids=lambda text: text[:40],
)
def test_hostile_policy_files(text):
    with pytest.raises(PolicyError):
        Policy.from_json(text)


def test_unknown_op_names_call_nothing():
    """A name is looked up, not evaluated."""
    with pytest.raises(PolicyError, match="torch has no op"):
        OpLists.default().with_black("aten.__init__('x')")


# -- the command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "os:system",
        "builtins:eval",
        "tests.test_untrusted_input:NAME",
        "../../etc/passwd:x",
        "a;b:c",
        "torchvision:__init__",
        "timm:../../x",
        "transformers:../x",
        "importlib:import_module",
        ":",
        "x:",
        ":x",
        "\x1b[31m:\x1b[31m",
    ],
)
def test_hostile_specs_end_in_one_line(spec, capsys):
    """What cannot make a model is an error of the user's, without a traceback."""
    assert main(["explain", spec, "--input", "1x4"]) in (1, 2)
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert told.err.startswith("ampgraph: ")
    assert "\x1b[31m" not in told.err


# -- names ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.GELU()))

    def forward(self, x):
        return getattr(self, self.name)(x).cumsum(-1)


@pytest.fixture(scope="module")
def amp():
    cls = type("Block", (Block,), {})
    cls.__qualname__ = cls.__name__ = NAME
    amp = ampgraph.convert(cls(NAME), dtype=torch.float16)
    amp(torch.ones(2, 4))
    return amp


@pytest.mark.parametrize(
    "name",
    [
        *(NAME, '"), print("owned"), ("', "a\nb", 'a"', "a\\", "a\x00"),
        *("class", "None", "a b", "a'b", "1", "self", "ü", "<b>"),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_names_are_names_and_never_code(name, level, capsys):
    """torch.fx writes ``getattr(self, "name")`` and ``self.class`` as they come."""
    model, x = Block(name), torch.ones(2, 4)
    amp = ampgraph.convert(model, (x,), policy=level, dtype=torch.bfloat16)
    amp(x).sum().backward()
    with torch.no_grad():
        getattr(model, name)[0].weight.copy_(torch.eye(4))
    assert (amp(x) - model(x)).norm() <= 0.02 * model(x).norm()
    assert all(p.grad is not None for p in model.parameters())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["class", 'a"b', "a\nb"], ids=ascii)
@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_tensors_with_such_names(name, kind):
    class Scaled(nn.Module):
        def forward(self, x):
            return (x @ getattr(self, name)).relu()

    model, value, x = Scaled(), torch.randn(4, 4), torch.ones(2, 4)
    if kind == "parameter":
        model.register_parameter(name, nn.Parameter(value))
    elif kind == "buffer":
        model.register_buffer(name, value)
    else:
        setattr(model, name, value)
    amp = ampgraph.convert(model, (x,), dtype=torch.bfloat16)
    with torch.no_grad():
        getattr(model, name).mul_(2)
    assert (amp(x) - model(x)).norm() <= 0.02 * model(x).norm()


def is_plain(text):
    """No control characters but line feeds, and nothing that turns the direction of writing."""
    return not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_reports_print_no_control_characters(amp):
    explanation = ampgraph.explain(amp)
    for text in (str(explanation), explanation.to_markdown(), *map(explanation.why, names_of(explanation))):
        assert is_plain(text)
    assert "x1b" in str(explanation)


def names_of(explanation):
    return [node.name for node in explanation.nodes] + [cast.name for cast in explanation.casts]


def test_markdown_has_no_markup_of_names(amp):
    text = ampgraph.explain(amp).to_markdown()
    assert "script>" in text
    assert not re.search(r"<(?:script|/title|b)\b", text)


def test_json_keeps_names_as_they_are(amp):
    data = json.loads(ampgraph.explain(amp).to_json())
    assert any("<script>alert" in node["module"] for node in data["nodes"])


@pytest.mark.parametrize("format", ["svg", "dot", "html"])
def test_pictures_escape_names(amp, format, tmp_path):
    text = ampgraph.draw(amp, tmp_path / f"x.{format}").read_text()
    assert is_plain(text.replace("\t", " "))
    if format != "dot":
        assert "<script>alert" not in text
    if format == "svg":
        elements = list(ElementTree.fromstring(text).iter())
        assert "alert(1)" in "".join(e.text or "" for e in elements)
        assert not {e.tag.rpartition("}")[2] for e in elements} & {"script", "foreignObject", "b"}
        assert not [key for e in elements for key in e.attrib if key.lower().startswith("on")]
