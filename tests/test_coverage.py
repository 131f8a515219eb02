"""Coverage of a model with graph breaks: the captured part, and the report on the rest."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import ampgraph
from ampgraph.errors import AmpGraphError

BF16 = torch.bfloat16
X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([5, 3, 2])


class Packed(nn.Module):
    """Dynamo does not trace the packing."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(x), lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(padded)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Branch(Two):
    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else -self.b(x)


class Number(Two):
    def forward(self, x):
        x = self.a(x)
        return self.b(x) * x.sum().item()


class Prints(Two):
    def forward(self, x):
        x = self.a(x)
        print(end="")
        return self.b(x)


class Disabled(Two):
    @torch.compiler.disable
    def between(self, x):
        return x.exp() @ x.mT

    def forward(self, x):
        return self.a(x) + self.b(x) * self.between(self.a(x)).sum()


class Unused(Two):
    def forward(self, x):
        return self.a(x)


class Nested(Two):
    def forward(self, x):
        return self.b(self.a(x))


class Skipped(Two):
    """A break that no graph can go around: Dynamo gives up the whole frame and compiles what it calls."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = Branch(), nn.Parameter(torch.ones(4))

    def forward(self, x):
        for layer in (self.a, self.b):
            try:
                x = layer(x) * self.scale
                torch._dynamo.graph_break()
            finally:
                x = self.inner(x)
        return x


def told(recwarn):
    return [str(w.message) for w in recwarn if "is captured in parts" in str(w.message)]


def converted(model, *args):
    amp = ampgraph.convert(model, dtype=BF16, capture="just in time")
    amp(*args).sum().backward()
    return amp


def test_explain_says_first_what_is_captured(recwarn):
    explanation = ampgraph.explain(converted(Packed(), X, LENGTHS))
    first = "captured: 2 graphs, 2 of 3 modules with parameters; not captured: rnn (graph breaks at "
    assert str(explanation).startswith(first)
    assert "test_coverage.py:" in str(explanation).splitlines()[0]
    title, second, *_ = explanation.to_markdown().split("\n\n")
    assert title.startswith("# Packed")
    assert second.startswith(first)
    plain = json.loads(explanation.to_json())
    assert next(iter(plain)) == "coverage"
    assert plain["coverage"]["left_out"] == ["rnn"]
    read = ampgraph.Explanation.from_dict(plain)
    assert read.coverage == explanation.coverage
    assert str(read) == str(explanation)
    assert explanation.under("O2").coverage == explanation.coverage
    for wrong in ({"graphs": 1}, "all", 3):
        with pytest.raises(AmpGraphError, match="not a report"):
            ampgraph.Explanation.from_dict({**plain, "coverage": wrong})


def test_what_is_captured_whole_has_no_graph_breaks(recwarn):
    amp = converted(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), X)
    assert str(amp.coverage) == "captured: 1 graph, 2 of 2 modules with parameters"
    ahead = ampgraph.convert(nn.Linear(4, 4), (X,), dtype=BF16)
    assert ampgraph.explain(ahead).coverage is None
    assert str(ampgraph.explain(ahead)).startswith("Linear: ")
    assert ampgraph.Explanation.from_dict(ampgraph.explain(ahead).to_dict()).coverage is None
    assert not told(recwarn)


@pytest.mark.parametrize("build", [Branch, Number, Prints])
def test_breaks_that_leave_no_op_out_are_explained_and_not_warned_about(build, recwarn):
    amp = converted(build(), X)
    assert amp.coverage.graphs == 2
    assert not amp.coverage.left_out
    assert [b.runs_ops for b in amp.coverage.breaks] == [False]
    assert amp.coverage.breaks[0].where.startswith(__file__)
    assert not told(recwarn)


@pytest.mark.parametrize(("build", "args"), [(Packed, (X, LENGTHS)), (Disabled, (X,)), (Skipped, (X,))])
def test_what_a_break_leaves_out_is_warned_about_once(build, args, recwarn):
    amp = converted(build(), *args)
    (message,) = told(recwarn)
    assert message.startswith(f"{build.__name__} is captured in parts: captured: ")
    assert "test_coverage.py:" in message
    amp(*(a[:2] for a in args))
    amp.eval()(*args)
    assert len(told(recwarn)) == 1


def test_a_converted_model_inside_has_its_own_graphs(recwarn):
    outer = Nested()
    outer.a = ampgraph.convert(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (X,), dtype=BF16)
    coverage = converted(outer, X).coverage
    assert (coverage.modules, coverage.left_out, coverage.breaks) == (1, (), ())
    assert not told(recwarn)


def test_modules_that_no_graph_reads(recwarn):
    assert converted(Unused(), X).coverage.left_out == ("b",)
    assert not told(recwarn)
    skipped = converted(Skipped(), X).coverage
    assert set(skipped.left_out) == {"", "a", "b"}
    assert "not captured: the root, a, b" in str(skipped)


class Layers(nn.Module):
    """Dynamo takes one graph for the layers, behind the break in each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Branch(), Branch(), Branch()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_share_a_graph_are_covered():
    coverage = converted(Layers(), X).coverage
    assert coverage.graphs < 6
    assert coverage.left_out == ()


def test_breaks_of_other_models_are_not_taken_over():
    first = converted(Branch(), X)
    converted(Disabled(), X)
    first(X[:2])
    assert [b.runs_ops for b in first.coverage.breaks] == [False]


def test_a_block_is_named(recwarn):
    model = nn.ModuleDict({"inner": Disabled()})
    blocks = ampgraph.convert_blocks(model, "inner", dtype=BF16, capture="just in time")
    model["inner"](X)
    assert told(recwarn)[0].startswith("inner: Disabled is captured in parts: ")
    assert blocks["inner"].coverage.graphs == 2


def test_a_packed_sequence_falls_back_and_trains(recwarn):
    torch.manual_seed(0)
    model = Packed()
    reference = copy.deepcopy(model)
    amp = ampgraph.convert(model, (X, LENGTHS), dtype=BF16)
    assert len([w for w in recwarn if "just in time instead" in str(w.message)]) == 1
    close(amp, reference, lambda each: each(X, LENGTHS))


def close(amp, reference, run):
    """Compares a training step's result and gradients with the source's."""
    outputs = [run(each) for each in (amp, reference)]
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)
    for output in outputs:
        output.square().mean().backward()
    names = dict(reference.named_parameters())
    for name, p in amp.named_parameters():
        q = names[name].grad
        assert (p.grad is None) == (q is None)
        assert q is None or torch.linalg.norm(p.grad - q) <= 0.05 * q.norm() + 1e-6, name


def test_a_model_on_which_dynamo_gave_up_for_a_while_is_converted_again(recwarn):
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)
    source, x = nn.Sequential(*layers), torch.randn(8, 8)
    amp = ampgraph.convert(source, dtype=torch.bfloat16)
    with torch.no_grad():
        amp.eval()(x)
        update_bn([x, x], amp)  # batch norms without a momentum read a number; Dynamo gives up on the loop
        assert [str(w.message) for w in recwarn if "unconverted in this call" in str(w.message)]
        amp.eval()
        found, exact = amp(x), source(x)
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()


def test_a_mode_in_which_nothing_is_captured_is_tried_a_few_times():
    source, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)), torch.randn(8, 8)
    amp, captured = ampgraph.convert(source, dtype=torch.bfloat16), []
    amp.eval()(x)
    with pytest.warns(UserWarning, match="unconverted in this call"):
        amp.train()(x)
    for _ in range(8):
        amp.eval()(x)
        captured.append(len(amp.graph_modules))
        amp.train()(x)
    assert captured[-1] == captured[4] > captured[0]


def test_a_call_that_returns_what_it_was_given_is_not_unconverted(recwarn):
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, skip=False):
            return x if skip else self.fc(x)

    amp, x = ampgraph.convert(Optional(), dtype=torch.bfloat16), torch.randn(2, 4)
    amp(x)
    assert amp(x, skip=True) is x
    assert not list(recwarn)
