"""Blocks with a changed ``forward``: patched, hooked, compiled, wrapped; and back."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

import ampgraph
from ampgraph import Policy, PolicyError
from ampgraph._compat import VERSION
from ampgraph.testing import assert_dtype

from .helpers import close

LOW = Policy(dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * self.down(self.up(x).relu())


def model_of(block: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(block or Block(), nn.Linear(4, 4))


def patch_closure(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x: forward(x) + 10.0


def patch_bound(block: nn.Module) -> None:
    block.forward = types.MethodType(lambda self, x: self.up(x).sum(-1, keepdim=True) + x, block)


def patch_wrapped(block: nn.Module) -> None:
    forward = block.forward

    @functools.wraps(forward)
    def other(*args: Any) -> torch.Tensor:
        return -forward(*args)

    block.forward = other


@pytest.mark.parametrize("patch", [patch_closure, patch_bound, patch_wrapped])
def test_a_patched_forward_is_what_is_converted_and_comes_back(patch: Callable) -> None:
    model, x = model_of(), torch.randn(3, 4)
    patch(model[0])
    patched, expected = model[0].forward, model(x)
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    close(model(x), expected)
    assert_dtype(blocks["0"], "up", torch.bfloat16)
    blocks.restore()
    assert model[0].forward is patched
    assert torch.equal(model(x), expected)


def test_a_copy_of_a_patched_block_is_independent() -> None:
    model, x = model_of(), torch.randn(3, 4)
    patch_bound(model[0])
    ampgraph.convert_blocks(model, "0", policy=LOW)
    expected = model(x)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model[0].up.weight.zero_()
    assert torch.equal(copied(x), expected)
    assert not torch.equal(model(x), expected)


def test_what_wraps_the_forward_later_stays_when_it_is_restored() -> None:
    model, x = model_of(), torch.randn(3, 4)
    expected = model[0](x)
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    patch_wrapped(model[0])
    close(model[0](x), -expected)
    with pytest.raises(PolicyError, match="converted already"):
        ampgraph.convert_blocks(model, "0")
    blocks.restore()
    assert torch.equal(model[0](x), -expected)
    ampgraph.convert_blocks(model, "0", policy=LOW)
    close(model[0](x), -expected)


class Hook:
    """Accelerate's protocol of a hook; counts its calls."""

    no_grad = False

    def __init__(self) -> None:
        self.calls = 0

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple:
        self.calls += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + 10.0

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_hooks_run_at_every_call(when) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, hook, x = model_of(), Hook(), torch.randn(3, 4)
    plain = model[0](x)
    if when == "before":
        hooks.add_hook_to_module(model[0], hook)
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    if when == "after":
        hooks.add_hook_to_module(model[0], hook)
    for calls in (1, 2, 3):
        close(model[0](x), plain + 10.0)
        assert hook.calls == calls
    assert_dtype(blocks["0"], "up", torch.bfloat16)
    with pytest.raises(PolicyError, match="converted already"):
        ampgraph.convert_blocks(model, "0")
    blocks.restore()
    assert torch.equal(model[0](x), plain + 10.0)
    assert hook.calls == 4
    hooks.remove_hook_from_module(model[0])
    assert torch.equal(model[0](x), plain)


def test_a_hook_that_leaves_leaves_the_block_converted() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = model_of(), torch.randn(3, 4)
    plain = model[0](x)
    hooks.add_hook_to_module(model[0], Hook())
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    hooks.remove_hook_from_module(model[0])
    low = model[0](x)
    close(low, plain)
    assert not torch.equal(low, plain)
    blocks.restore()
    assert torch.equal(model[0](x), plain)


def compile_in_place(model: nn.Module) -> None:
    model[0].compile(backend="eager")


def compile_child(model: nn.Module) -> None:
    model[0] = torch.compile(model[0], backend="eager")


def checkpoint_child(model: nn.Module) -> None:
    model[0] = checkpoint_wrapper(model[0])


@pytest.mark.parametrize("wrap", [compile_in_place, compile_child, checkpoint_child])
@pytest.mark.parametrize("when", ["before", "after"])
def test_wrapped_children(wrap: Callable, when: str) -> None:
    model, x = model_of(), torch.randn(3, 4)
    expected = model(x)
    expected.sum().backward()
    gradient = model[0].up.weight.grad.clone()
    model.zero_grad()
    block = model[0]
    if when == "before":
        wrap(model)
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    if when == "after":
        wrap(model)
    output = model(x)
    output.sum().backward()
    close(output, expected)
    close(block.up.weight.grad, gradient)
    assert not torch.equal(output, expected)
    assert_dtype(blocks["0"], "up", torch.bfloat16)
    blocks.restore()
    assert torch.equal(model(x), expected)


def test_rules_reach_what_is_wrapped() -> None:
    for name in ("0.up", "0._checkpoint_wrapped_module.up"):
        model = model_of(checkpoint_wrapper(Block()))
        policy = LOW.replace(rules={name: "fp32"})
        blocks = ampgraph.convert_blocks(model, "0", policy=policy)
        model(torch.randn(3, 4))
        assert_dtype(blocks["0"], "up", torch.float32)
        assert_dtype(blocks["0"], "down", torch.bfloat16)


def test_a_call_of_the_class_runs_once() -> None:
    class Doubling(Block):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(2 * x)

    model, x = model_of(Doubling()), torch.randn(3, 4)
    expected = model(x)
    ampgraph.convert_blocks(model, "0", policy=LOW)
    close(model(x), expected)


def test_attributes_of_a_block_are_those_of_its_converted_module() -> None:
    model = model_of()
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    model(torch.randn(3, 4))
    blocks["0"].gain = 3.0
    assert model[0].gain == 3.0
    model[0].gain = 5.0
    assert blocks["0"].gain == 5.0


def test_a_block_whose_class_changes_after_its_first_call() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    model(x)
    parametrizations.weight_norm(model[0])
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(3)
    output = model(x)
    parametrize.remove_parametrizations(model[0], "weight")
    close(model(x), output)
    blocks.restore()
    close(model(x), output)


def test_a_copy_of_the_converted_module_is_the_plain_block() -> None:
    model, x = model_of(), torch.randn(3, 4)
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    output = model[0](x)
    copied = copy.deepcopy(blocks["0"])
    assert type(copied.source) is Block
    assert torch.equal(copied(x), output)
    assert not torch.equal(copied.source(x), output)


def zeroed_copy(module: nn.Module) -> nn.Module:
    other = copy.copy(module)
    other._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in module._parameters.items()}
    return other


def zeroed_replica(module: nn.Module) -> nn.Module:
    """As ``nn.DataParallel`` makes one."""
    other = module._replicate_for_data_parallel()
    other._parameters = {}
    for name, parameter in module._parameters.items():
        setattr(other, name, torch.zeros_like(parameter))
    return other


def subclass_of(module: nn.Module, **members: Any) -> type[nn.Module]:
    """Returns a class generated for one copy, whose objects get no tables of the module."""
    return type("Generated", (type(module),), {"__init__": nn.Module.__init__, **members})


def functional(module: nn.Module, values: dict[str, torch.Tensor]) -> nn.Module:
    """As ``higher`` makes one: a generated class has the parameters, and all but these tables are copied."""
    tables = {"_parameters", "_buffers", "_modules"} | {f"_{kind}_hooks" for kind in ("backward", "forward")}
    members = {name: property(lambda _, name=name: values[name]) for name in module._parameters}
    other = subclass_of(module, **members)()
    for name, value in vars(module).items():
        if name not in tables:
            setattr(other, name, value)
    return other


def zeroed_functional(module: nn.Module) -> nn.Module:
    return functional(module, {name: torch.zeros_like(p) for name, p in module._parameters.items()})


def zeroed_attributes(module: nn.Module) -> nn.Module:
    """A copy of a generated class that has all tables new, and tensors for parameters."""
    other = subclass_of(module)()
    names = vars(module).keys() - vars(nn.Module()).keys()
    vars(other).update({name: vars(module)[name] for name in names})
    vars(other).update({name: torch.zeros_like(p) for name, p in module._parameters.items()})
    return other


def zeroed_other(module: nn.Module) -> nn.Module:
    """A copy of a class that leaves forward to the attribute."""
    other = nn.Module()
    vars(other).update(vars(module))
    other._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in module._parameters.items()}
    return other


def zeroed_called(module: nn.Module) -> nn.Module:
    """A copy whose class has a call of its own."""

    class Called(type(module)):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x)

    other = zeroed_copy(module)
    other.__class__ = Called
    return other


ZEROED = [zeroed_copy, zeroed_replica, zeroed_functional, zeroed_attributes, zeroed_other, zeroed_called]


@pytest.mark.parametrize("copied", ZEROED)
@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_shallow_copy_runs_unconverted_with_its_own_parameters(copied: Callable, is_hooked: bool) -> None:
    model, x = model_of(nn.Linear(4, 4)), torch.randn(2, 4)
    if is_hooked:
        model[0].register_forward_hook(lambda module, args, result: result * 2)
    blocks = ampgraph.convert_blocks(model, "0", policy=LOW)
    expected = model(x)
    with pytest.warns(UserWarning, match="0 was converted with convert_blocks, and a shallow copy of it"):
        assert not copied(model[0])(x).any()
    assert torch.equal(model(x), expected)
    assert list(blocks) == ["0"]


@pytest.mark.parametrize("copied", [zeroed_copy, zeroed_functional])
def test_a_compiled_or_traced_copy_runs_with_its_own_parameters(copied: Callable) -> None:
    model, x = model_of(nn.Linear(4, 4)), torch.randn(2, 4)
    ampgraph.convert_blocks(model, "0", policy=LOW)
    expected, other = model(x), copied(model[0])
    with pytest.warns(UserWarning, match="0 was converted with convert_blocks, and a shallow copy of it"):
        assert not torch.compile(other, backend="eager")(x).any()
    assert not torch.jit.trace(other, (x,), check_trace=False)(x).any()
    assert torch.equal(torch.compile(model, backend="eager")(x), expected)


def test_a_copy_of_a_patched_block_runs_the_patch_with_its_own_parameters() -> None:
    model, x = model_of(nn.Linear(4, 4)), torch.randn(2, 4)
    model[0].forward = types.MethodType(lambda self, x: x @ self.weight + 1, model[0])
    ampgraph.convert_blocks(model, "0", policy=LOW)
    with pytest.warns(UserWarning, match="a shallow copy of it"):
        assert torch.equal(zeroed_copy(model[0])(x), torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:0 was converted with convert_blocks")
def test_updates_of_a_copy_have_an_effect() -> None:
    """An inner loop of meta learning: gradients of the copy, and steps of the copy alone."""
    model, x = model_of(nn.Linear(4, 4)), torch.randn(2, 4)
    ampgraph.convert_blocks(model, "0", policy=LOW)
    values = dict(model[0].named_parameters())
    fast, losses = functional(model[0], values), []
    for _ in range(3):
        loss = fast(x).square().mean()
        gradients = torch.autograd.grad(loss, list(values.values()), create_graph=True)
        values.update({name: p - 0.1 * g for (name, p), g in zip(values.items(), gradients, strict=True)})
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    loss.backward()
    assert model[0].weight.grad.any()


class Derived(nn.Linear):
    """A wrapper of a class made from the block's, around the block."""

    def __init__(self, block: nn.Linear) -> None:
        super().__init__(4, 4)
        self.block, self.forward = block, block.forward


def over_its_dict(block: nn.Module) -> nn.Module:
    other = object.__new__(subclass_of(block))
    object.__setattr__(other, "__dict__", vars(block))
    return other


@pytest.mark.parametrize("wrapper", [Derived, over_its_dict])
def test_what_has_the_block_or_its_dict_is_no_copy(wrapper: Callable, recwarn) -> None:
    model, x = model_of(nn.Linear(4, 4)), torch.randn(2, 4)
    ampgraph.convert_blocks(model, "0", policy=LOW)
    assert torch.equal(wrapper(model[0])(x), model[0](x))
    assert not recwarn.list


def generated_copy(amp: nn.Module) -> nn.Module:
    """As ``higher`` begins one."""

    class Functional(type(amp)):
        def __init__(self, parameters: object) -> None:
            nn.Module.__init__(self)

    return Functional(amp.parameters())


def cloned(amp: nn.Module) -> nn.Module:
    """As ``learn2learn`` begins one."""
    return amp.__new__(type(amp))


@pytest.mark.parametrize("args", [None, (torch.ones(2, 4),)])
@pytest.mark.parametrize("copied", [generated_copy, cloned])
def test_a_copy_of_a_converted_model_part_by_part_says_what_to_do(copied: Callable, args: Any) -> None:
    amp = ampgraph.convert(nn.Linear(4, 4), args, policy=LOW)
    with pytest.raises(
        ampgraph.CaptureError, match=r"copy the source \(model.source\), or .*functional_call"
    ):
        copied(amp)


def test_a_generated_class_around_a_converted_model_says_what_to_do() -> None:
    amp = ampgraph.convert(nn.Linear(4, 4), policy=LOW)
    generated = type("Generated", (type(amp),), {"__init__": lambda self, _: nn.Module.__init__(self)})
    with pytest.raises(AttributeError, match=r"Generated has no model.*copies a converted model"):
        generated(amp)


def test_data_parallel_says_what_to_do() -> None:
    amp = ampgraph.convert(nn.Linear(4, 4), (torch.ones(2, 4),), policy=LOW)
    with pytest.raises(ampgraph.CaptureError, match="DataParallel cannot replicate the converted Linear"):
        amp._replicate_for_data_parallel()


def test_an_object_without_a_model_has_no_attributes() -> None:
    empty = object.__new__(ampgraph.AmpModule)
    with pytest.raises(AttributeError, match="has no model, and so no attribute 'weight'"):
        _ = empty.weight


@pytest.mark.parametrize("other", [nn.Identity, lambda: nn.Linear(4, 4)])
def test_another_module_may_have_the_forward_of_a_block(other: Callable, recwarn) -> None:
    model, x = model_of(nn.Linear(4, 4)), torch.randn(2, 4)
    ampgraph.convert_blocks(model, "0", policy=LOW)
    wrapper = other()
    wrapper.forward = model[0].forward
    assert torch.equal(wrapper(x), model[0](x))
    assert not recwarn.list


@pytest.mark.skipif(VERSION < (2, 12), reason="Dynamo of torch 2.11 does not trace the call of a block")
def test_a_strict_export_of_a_model_with_blocks() -> None:
    model, x = model_of(nn.Linear(4, 4)), torch.randn(2, 4)
    ampgraph.convert_blocks(model, "0", policy=LOW)
    expected = model(x)
    program = torch.export.export(model, (x,), strict=True)
    assert torch.equal(program.module()(x), expected)
