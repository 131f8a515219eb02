"""One tensor, or one piece of memory, passed in several places: no capture may take that for a rule."""

import pytest
import torch
from torch import nn

import ampgraph
from tests.helpers import close

LOW = {"policy": "O2", "dtype": torch.bfloat16}


class Difference(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(3, 4))
        self.constant = torch.randn(3, 4)

    def forward(self, x, y):
        return self.fc(x) - y


class Nested(Difference):
    def forward(self, batch, pair):
        return super().forward(batch["x"], pair[0] * batch["mask"])


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, input_ids, labels=None):
        return nn.functional.cross_entropy(self.head(self.table(input_ids)), labels)


def close_all(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        close(one, other)


def both(*shape):
    return torch.randn(shape), torch.randn(shape)


def nested(x, y, mask):
    return {"x": x, "mask": mask}, [y]


def examples(model):
    """Yields example arguments of `Difference` that share tensors or memory."""
    x, base = torch.randn(3, 4), torch.randn(4, 4)
    yield x, x
    yield base[:3], base[1:]
    yield x, x.t().t()
    yield x, model.fc.weight[:3]
    yield base, model.fc.weight
    yield x, model.table
    yield model.table, model.constant
    leaf = torch.randn(3, 4, requires_grad=True)
    yield leaf, leaf
    result = leaf * 2
    yield result, result


@pytest.mark.parametrize("position", range(9))
def test_two_arguments_at_capture_are_two_at_a_call(position):
    model = Difference()
    args = list(examples(model))[position]
    amp = ampgraph.convert(model, args, **LOW)
    x, y = both(*args[0].shape)
    close(amp(x, y), model(x, y))
    close(amp(*args), model(*args))
    assert len(amp.graph_modules) == 1


def test_arguments_in_dicts_and_lists():
    model, x = Difference.__new__(Nested), torch.randn(3, 4)
    model.__init__()
    amp = ampgraph.convert(model, nested(x, x, x), **LOW)
    args = nested(*both(3, 4), torch.rand(3, 4))
    close(amp(*args), model(*args))


def test_keyword_arguments():
    model, ids = Labelled(), torch.arange(5)
    amp = ampgraph.convert(model, (), {"input_ids": ids, "labels": ids}, **LOW)
    other = {"input_ids": torch.tensor([3, 1, 4, 1, 5]), "labels": torch.tensor([2, 7, 1, 0, 2])}
    close(amp(**other), model(**other))


def test_a_later_call_with_one_tensor():
    model = Difference()
    amp = ampgraph.convert(model, both(3, 4), **LOW)
    z = torch.randn(5, 4)
    close(amp(z, z), model(z, z))
    x, y = both(5, 4)
    close(amp(x, y), model(x, y))
    x, y = both(7, 4)
    close(amp(x, y), model(x, y))
    assert len(amp.graph_modules) == 2


def test_attention_over_itself():
    model, q = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    amp = ampgraph.convert(model, (q, q, q), **LOW)
    args = (torch.randn(2, 3, 8), *both(2, 3, 8))
    close(amp(*args)[0], model(*args)[0])
    close(amp(q, q, q)[0], model(q, q, q)[0])


def test_a_block_called_with_one_tensor_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Difference()

        def forward(self, x):
            h = x * 2
            return self.block(h, h), self.block(h, x)

    model, x = Twice(), torch.randn(3, 4, requires_grad=True)
    wanted = model(x)
    ampgraph.convert_blocks(model, "block", **LOW)
    close_all(model(x), wanted)


def test_an_exported_program():
    model, x = Difference(), torch.randn(3, 4)
    program = ampgraph.export(model, (x, x), **LOW)
    args = both(3, 4)
    close(program.module()(*args), model(*args))


def test_gradients_go_to_the_argument_that_was_read():
    model, x = Difference(), torch.randn(3, 4, requires_grad=True)
    amp = ampgraph.convert(model, (x, x), **LOW)
    x, y = (t.requires_grad_() for t in both(3, 4))
    amp(x, y).sum().backward()
    assert torch.equal(y.grad, -torch.ones(3, 4))
    assert not torch.equal(x.grad, y.grad)


class WritesBetween(Difference):
    """Reads ``y``, in the low dtype, before and after a write through ``x``."""

    def forward(self, x, y):
        before = self.fc(y)
        x.mul_(-2.0)
        return before, self.fc(y)


class WritesBuffer(Difference):
    def forward(self, x):
        before = self.fc(x)
        self.table.mul_(-2.0)
        return before, self.fc(x)


def shared(z):
    """Yields, over one piece of memory, arguments that share it in several ways."""
    yield z[:3], z[:3]
    yield z[:3], z[1:]
    yield z[:3], z[:3].t().t()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("example", ["apart", "shared"])
def test_a_write_through_one_argument_is_seen_by_the_other(level, way, example):
    model, z = WritesBetween().eval(), torch.randn(4, 4)
    wanted_memory, memory = z.clone(), z.clone()
    wanted = model(*list(shared(wanted_memory))[way])
    x, y = both(3, 4)
    wanted_apart = model(x.clone(), y)
    given = both(3, 4) if example == "apart" else list(shared(torch.randn(4, 4)))[way]
    amp = ampgraph.convert(model, given, policy=level, dtype=torch.bfloat16)
    got = amp(*list(shared(memory))[way])
    close_all(got, wanted)
    assert torch.equal(memory, wanted_memory)
    close_all(amp(x, y), wanted_apart)
    assert len(amp.graph_modules) <= 2


@torch.no_grad()
def test_a_write_to_a_buffer_that_is_an_argument():
    model = WritesBuffer()
    amp = ampgraph.convert(model, (torch.randn(3, 4),), **LOW)
    before = model.table.clone()
    wanted = model(model.table)
    model.table.copy_(before)
    got = amp(model.table)
    close_all(got, wanted)
    assert torch.equal(model.table, before * -2)
