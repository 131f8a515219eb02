"""Fake tensors with the strides and dtypes of kernels. Tried on torch 2.11, 2.13 and 2.14."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

Layout = tuple[tuple[int, ...], torch.dtype]


class KernelLayouts(FakeTensorMode):
    """A mode whose fake tensors have the strides and dtypes that kernels give to their results.

    FakeTensor finds other strides for some ops on tensors that are not contiguous: batch norm, backwards of
    layer norm, activations and losses, and more. It finds other dtypes for norms of mixed ones (seen in
    torch 2.13). So such calls of torch's ops run once on tensors of ones.
    """

    def __init__(self) -> None:
        # Heavy imports.
        from torch._functorch import config
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):  # as make_fx does
            super().__init__(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        self._known: dict[Any, list[Layout]] = {}
        self._is_inside = False

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_inside or not _may_differ(func, tree_leaves((args, kwargs))):
            return super().dispatch(func, types, args, kwargs)
        self._is_inside = True  # a decomposition calls other ops
        try:
            result = super().dispatch(func, types, args, kwargs)
            fakes = [x for x in tree_leaves(result) if isinstance(x, FakeTensor)]
            layouts = iter(self._layouts(func, args, kwargs, fakes))
            return tree_map_only(FakeTensor, lambda fake: self._laid_out(fake, *next(layouts)), result)
        finally:
            self._is_inside = False

    def _layouts(
        self, func: OpOverload, args: Sequence[Any], kwargs: Any, fakes: list[FakeTensor]
    ) -> list[Layout]:
        key = (func, *map(_key, tree_leaves((args, kwargs))))
        if key not in self._known:
            self._known[key] = _layouts_on_ones(func, args, kwargs, fakes)
        return self._known[key]

    def _laid_out(self, fake: FakeTensor, stride: tuple[int, ...], dtype: torch.dtype) -> FakeTensor:
        if (fake.stride(), fake.dtype) == (stride, dtype):
            return fake
        meta = torch.empty_strided(fake.shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self, meta, fake.device)


def _may_differ(func: OpOverload, leaves: Sequence[Any]) -> bool:
    if func.namespace != "aten" or any(value.alias_info is not None for value in func._schema.returns):
        return False  # a write or a view
    if not func._schema.returns or "rnn" in func.__name__:  # a check; kernels that read the grad mode
        return False
    fakes = [x for x in leaves if isinstance(x, FakeTensor)]
    if any(x.layout != torch.strided for x in fakes) or any(isinstance(x, torch.Generator) for x in leaves):
        return False
    is_mixed = len({x.dtype for x in fakes if x.is_floating_point()}) > 1
    return is_mixed or not all(x.is_contiguous() for x in fakes)


def _key(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value), value
    return value.dtype, value.device, value.shape, value.stride()


def _layouts_on_ones(func: OpOverload, args: Any, kwargs: Any, fakes: list[FakeTensor]) -> list[Layout]:
    """Returns the layouts of an op's results; those of the fake tensors if it does not take ones."""
    expected = [(fake.stride(), fake.dtype) for fake in fakes]
    try:
        with _disable_current_modes(), torch.no_grad(), _keeping_generators(func, fakes):
            args, kwargs = tree_map_only(FakeTensor, _ones, (args, kwargs))
            results = tree_leaves(func(*args, **kwargs))
    except Exception:  # such as a solver, for which a matrix of ones is singular
        return expected
    reals = [x for x in results if isinstance(x, Tensor)]
    if [x.shape for x in reals] != [fake.shape for fake in fakes]:
        return expected  # the sizes depend on values
    return [(x.stride(), x.dtype) for x in reals]


@contextmanager
def _keeping_generators(func: OpOverload, fakes: list[FakeTensor]) -> Iterator[None]:
    """Puts back the generators that an op moves, not by functions of torch: captures notice those."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    generators = [_generator(device) for device in {fake.device for fake in fakes}] if draws else []
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    return generators[device.index]


def _ones(fake: FakeTensor) -> Tensor:
    """Returns ones of the same layout, which may show an element several times; as integers, zeros.

    A GPU would stop the process at an index out of range, and at probabilities of zero.
    """
    last = sum((size - 1) * step for size, step in zip(fake.shape, fake.stride(), strict=True))
    make = torch.ones if fake.is_floating_point() else torch.zeros
    memory = make(last + 1 if fake.numel() else 0, dtype=fake.dtype, device=fake.device)
    return memory.as_strided(fake.shape, fake.stride())
