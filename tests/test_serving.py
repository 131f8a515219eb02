"""Calls as servers make them: methods of the model, generation with a cache, other sizes, optional inputs."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import CaptureError
from ampgraph._compat import VERSION
from tests.zoo import models as zoo
from tests.zoo._more_modules import EarlyExit, Matcher, Segments

from .helpers import close, dtype_of

BF16 = torch.bfloat16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CAPTURES = pytest.mark.parametrize("how", ["ahead of time", "just in time"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def convert(model, how, *args, **kwargs):
    if how == "ahead of time":
        return ampgraph.convert(model, args, kwargs, dtype=BF16)
    return ampgraph.convert(model, dtype=BF16)


# -- methods --------------------------------------------------------------------------------------------


class Predictor(nn.Module):
    registry: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls):
        Predictor.registry.append(cls.__name__)

    def predict(self, x):
        return self(x)


class Agent(Predictor):
    """Its attribute `policy` has a namesake in the converted model."""

    def __init__(self):
        super().__init__()
        self.layer, self.policy, self.calls = nn.Linear(8, 8), nn.Linear(8, 2), 0

    def forward(self, x):
        return self.policy(self.layer(x).relu())

    def predict(self, x, *, scale=1.0):
        self.calls += 1
        assert isinstance(self, Agent)
        assert isinstance(self.policy, nn.Linear)
        return super().predict(x) * scale

    def forwarded(self, x):
        return self.forward(x)

    def itself(self):
        return self

    def another(self):
        return type(self)()

    def copied(self):
        return copy.deepcopy(self)


@CAPTURES
def test_a_method_that_calls_the_model_calls_the_converted_one(how):
    model = Agent()
    amp = convert(model, how, X)
    found = amp.predict(X, scale=2.0)
    assert torch.equal(found, 2 * amp(X))
    assert torch.equal(amp.forwarded(X), amp(X))
    assert not torch.equal(found, 2 * model(X))  # bfloat16 was there
    close(found, 2 * model(X), 0.03)
    assert (amp.calls, model.calls, len(amp.graph_modules)) == (1, 1, 1)


def test_methods_leave_no_trace_of_the_object_they_run_on():
    model = Agent()
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    assert amp.itself() is amp
    assert type(amp.another()) is type(amp.copied()) is Agent
    assert torch.equal(amp.copied()(X), model(X))
    assert Predictor.registry.count("Agent") == 1
    assert inspect.signature(amp.predict) == inspect.signature(model.predict)
    assert torch.equal(model.predict(X), model(X))


def test_hooks_run_once_in_a_method():
    model, seen = Agent(), []
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    amp.register_forward_hook(lambda *_: seen.append(1))
    amp.predict(X)
    assert seen == [1]


def test_a_copy_of_the_converted_model_runs_its_own_methods():
    amp = ampgraph.convert(Agent(), (X,), dtype=BF16)
    amp.predict(X)
    other = copy.deepcopy(amp)
    with torch.no_grad():
        other.source.policy.weight.zero_()
        other.source.policy.bias.zero_()
    assert not other.predict(X).any()
    assert amp.predict(X).any()


# -- generation -----------------------------------------------------------------------------------------


def language_model(name: str) -> nn.Module:
    pytest.importorskip("transformers")
    model, _, _ = zoo.get(f"transformers/{name}").seeded()
    model.generation_config.use_cache = True
    return model.eval()


GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generate_with_a_cache_runs_converted(name):
    """One capture for the prompt, one for the first new token, and one for all others."""
    model = language_model(name)
    prompt = torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(0))
    how = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    amp = ampgraph.convert(model, dtype=BF16)
    found, expected = amp.generate(prompt, **how), model.generate(prompt, **how)
    assert not torch.equal(found.logits[0], expected.logits[0])
    close(found.logits[0], expected.logits[0], 0.03)
    assert found.sequences.shape == expected.sequences.shape
    assert len(amp.graph_modules) <= 3
    amp.generate(prompt, **{**how, "max_new_tokens": 12})
    assert len(amp.graph_modules) <= 3


def test_generate_with_a_cache_ahead_of_time_says_what_to_do():
    model = language_model("gpt2")
    prompt = torch.ones(2, 5, dtype=torch.long)
    amp = ampgraph.convert(
        model, (), {"input_ids": prompt, "use_cache": False}, dtype=BF16, capture="ahead of time"
    )
    with pytest.raises(CaptureError, match=r"DynamicCache[\s\S]*just in time"):
        amp.generate(prompt, **GREEDY)


# -- sizes and optional inputs --------------------------------------------------------------------------


class Encoder(nn.Module):
    """Embedding of tokens and of positions, attention over the sequence, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)
        self.positions = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids):
        positions = torch.arange(ids.shape[1])
        return self.head(self.layer(self.embedding(ids) + self.positions(positions))).mean(1)


@CAPTURES
def test_batch_and_sequence_length_settle_on_few_captures(how):
    """Static first; then one dimension dynamic, then both; nothing is captured after that."""
    model = Encoder()
    sizes = [(2, 6), (3, 6), (3, 9), *((batch, length) for batch in (4, 7, 5) for length in (8, 12, 5))]
    amp = convert(model, how, torch.ones(sizes[0], dtype=torch.long))
    for size in sizes:
        ids = torch.randint(0, 20, size)
        close(amp(ids), model(ids), 0.05)
    assert len(amp.graph_modules) == len(amp.timings) <= 3


def test_a_batch_of_one_after_others_is_captured_without_a_warning(caplog):
    amp = ampgraph.convert(nn.Linear(8, 8), (X,), dtype=BF16)
    for size in (3, 1, 2, 1):
        assert len(amp(X[:size])) == size
    assert len(amp.graph_modules) == 3
    assert "specialized" not in caplog.text


@CAPTURES
def test_optional_and_keyword_inputs(how):
    """Each way of calling is captured once; a second round captures nothing."""
    model = Matcher()
    pixels, ids = torch.randn(4, 12), torch.randint(0, 20, (4, 5))
    calls = [
        ((pixels,), {}),
        ((pixels, ids), {}),
        ((pixels,), {"ids": ids}),
        ((pixels,), {"ids": ids, "loss": False}),
        ((), {"ids": ids, "pixels": pixels}),
    ]
    amp = convert(model, how, *calls[0][0])
    for args, kwargs in calls:
        found, expected = amp(*args, **kwargs), model(*args, **kwargs)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] is None) == (value is None)
            if value is not None:
                assert found[name].dtype == value.dtype
                close(found[name], value, 0.05)
    captures = len(amp.graph_modules)
    for args, kwargs in calls:
        amp(*args, **kwargs)
    assert len(amp.graph_modules) == captures <= len(calls)


# -- graph breaks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "args"),
    [
        (EarlyExit, (X.repeat(1, 2),)),
        (Segments, (X.repeat(3, 1)[:9], torch.tensor([0, 1, 1, 2, 3, 3, 0, 2, 1]))),
    ],
    ids=["a branch on a value", "sizes from values"],
)
def test_graph_breaks_run_converted_in_parts(made, args):
    model = made()
    amp = ampgraph.convert(model, dtype=BF16)
    amp(*args).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(*args).square().mean().backward()
    assert len(amp.graph_modules) > 1
    assert any(cast for module in amp.graph_modules for cast in ampgraph.explain(module).casts)
    close(amp(*args), model(*args), 0.03)
    for name, parameter in model.named_parameters():
        assert gradients[name].dtype == parameter.dtype
        close(gradients[name], parameter.grad, 0.1)


def test_data_of_a_computed_tensor_is_read():
    """Tracing does not see ``x.data``; a value computed from it can be read after a graph break."""

    class Observer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            peak = y.data.amax()
            assert peak.isnan().sum() == 0
            return y / peak

    model = Observer()
    amp = ampgraph.convert(model, dtype=BF16)
    for size in (4, 6, 7):
        x = torch.randn(size, 8, requires_grad=True)
        close(amp(x), model(x), 0.03)
        (found,) = torch.autograd.grad(amp(x).square().sum(), x)
        (expected,) = torch.autograd.grad(model(x).square().sum(), x)
        close(found, expected, 0.05)
    assert any(ampgraph.explain(module).casts for module in amp.graph_modules)


def test_part_without_anything_to_scale():
    """Behind the graph break there is low code, but only integers leave it."""

    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.book = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            hidden = self.embed(x)
            torch._dynamo.graph_break()
            return hidden, self.book(hidden.detach()).argmax(-1)

    model = Codes()
    amp = ampgraph.convert(model, dtype=torch.float16)
    hidden, codes = amp(X)
    close(hidden, model(X)[0], 0.01)
    assert codes.shape == (4,)
    assert len(amp.graph_modules) == 2


def test_sizes_read_from_tensors():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x):
            y = self.layer(x)
            return nn.functional.pad(y, (self.count, 0), mode="reflect") * 2

    model = Padded()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        amp = ampgraph.convert(model, dtype=BF16)
        close(amp(X), model(X), 0.03)


def test_dynamic_sizes_as_arguments_of_an_op():
    """Padding up to a multiple: how much is a size that is computed from sizes."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = nn.functional.pad(self.layer(x).cumsum(0), (0, 0, 0, -x.shape[0] % 4 + 4))
            return self.layer(y.unflatten(0, (-1, 4)))

    model = Blocks()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        amp = ampgraph.convert(model, policy="O2", dtype=BF16)
        for size in (5, 6, 7, 9, 11):
            x = torch.randn(size, 8)
            close(amp(x), model(x), 0.03)


@pytest.mark.skipif(VERSION < (2, 13), reason="torch 2.11 has torch._dynamo.config.recompile_limit only")
def test_many_layers_behind_graph_breaks():
    """Each has a separate class, so Dynamo compiles their shared code once for each."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.linear(x).relu() + x

    model = nn.Sequential(*(Layer() for _ in range(12)))
    amp = ampgraph.convert(model, dtype=BF16)
    close(amp(X), model(X), 0.05)
    low = [g for g in amp.graph_modules if BF16 in dtype_of(g, "linear")]
    assert len(low) == 12


def test_lists_of_constants():
    """``meshgrid`` gives several tensors that depend on no input."""

    class Grid(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(8.0), indexing="ij")
            return self.layer(x) + torch.stack([rows, columns]).sum(0)

    model = Grid()
    amp = ampgraph.convert(model, dtype=BF16)
    close(amp(X), model(X), 0.03)
    assert len(amp.graph_modules) == 1


def test_sizes_computed_from_numbers_by_tensor_ops() -> None:
    """Longformer and LED cut a sequence into ``torch.div(length, width, rounding_mode="trunc")`` chunks."""

    class Chunks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chunks = torch.div(x.size(1), 4, rounding_mode="trunc")
            parts = self.linear(x).view(x.size(0), chunks, 4)
            return self.linear(parts.flatten(1)).narrow(1, chunks - 1, 3) * chunks

    model, x = Chunks(), torch.randn(2, 8)
    amp = ampgraph.convert(model, dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = amp(x)
    assert dtype_of(amp.graph_module, "linear") == [torch.float16, torch.float16]
    torch.testing.assert_close(result, model(x), rtol=0.01, atol=0.01)
