"""`PythonState`: the Python values that a captured forward read, compared at each call."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..capture import is_capturing_here
from ..capture.code_place import Place
from ..capture.reads import Reads
from ..proxy.all_parameters import all_parameters
from .layouts import Layouts
from .outside_parts import OutsideParts
from .places import Places

# Settings of torch that code may ask for by name. The default dtype is that of ``torch.zeros(3)``, too.
_SETTINGS = (
    "are_deterministic_algorithms_enabled",
    "get_float32_matmul_precision",
    "get_num_threads",
    "is_anomaly_check_nan_enabled",
    "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "is_inference_mode_enabled",
    "is_warn_always_enabled",
)


class PythonState:
    """What forward read: attributes, globals, functions, values of tensors, settings of torch.

    Strides and the grad mode count if forward asked for them; `OutsideParts` counts as well.

    What forward sets itself does not count: it changes at every call.

    Args:
        source: The model.
        reads: What its forward read at capture.
        args: The positional arguments of the capture.
        kwargs: Its keyword arguments.
        alike: The state of a model that is like this one: what its code reads is the same.
    """

    def __init__(
        self,
        source: nn.Module,
        reads: Reads,
        args: tuple,
        kwargs: dict[str, Any],
        alike: PythonState | None = None,
    ) -> None:
        self._source = source
        attributes, own = _attributes(reads), {id(vars(m)) for m in source.modules()}
        found = alike._attributes.like(attributes, own) if alike else None
        self._attributes: Places = found or _settled(attributes, own)
        self._code: Places = alike._code if alike else _settled(reads.code_places())
        asked = (getattr(torch, name) for name in _SETTINGS if name in reads.code.names)
        # A hook may count or belong to a trainer: what no code names does not count.
        self._hooks = _settled(reads.code.hooks, names=reads.code.names | reads.code.strings)
        self._questions = [torch.get_default_dtype, *asked]
        self._answers = [ask() for ask in self._questions]
        self._values = [_Value(tensor) for tensor in reads.values.values()]
        self._autograd = _autograd(source, args, kwargs) if reads.asks.for_gradients else None
        self._outside = OutsideParts(reads.elsewhere.values(), source) if reads.elsewhere else None
        self._layouts = (
            Layouts(source, args, kwargs, reads.asks.for_offset) if reads.asks.for_layout else None
        )

    def fits(self, args: tuple, kwargs: dict[str, Any], is_untouched: bool = False) -> bool:
        """Whether forward would read the same values. Runs at every call.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            is_untouched: Whether nothing was written to the dict of a module since forward read the same.
        """
        if torch.compiler.is_dynamo_compiling():  # strict export cannot trace the comparison
            return True
        if [ask() for ask in self._questions] != self._answers:
            return False
        if not self._attributes.are_same(is_untouched):
            return False
        # A capture replaces functions of torch for as long as it lasts.
        if not (self._code.are_same() and self._hooks.are_same()) and not is_capturing_here():
            return False
        if self._values and not self._has_same_values():
            return False
        if self._outside is not None and not self._outside.are_same():
            return False
        if self._layouts is not None and not self._layouts.fits(args, kwargs, is_untouched):
            return False
        return self._autograd is None or self._autograd == _autograd(self._source, args, kwargs)

    def seen(self) -> list[Any]:
        """Returns what forward read of the model, to compare with another model of the same structure."""
        layouts = None if self._layouts is None else self._layouts.seen()
        return [self._attributes.seen(), self._answers, self._values, self._autograd, layouts]

    def has_same_code(self) -> bool:
        """Whether globals and functions are the same."""
        return self._code.are_same()

    def is_same(self) -> bool:
        """Whether attributes, globals and functions are the same; arguments do not count."""
        places = self._attributes, self._code, self._hooks
        is_outside_same = self._outside is None or self._outside.are_same()
        return all(p.are_same() for p in places) and self._has_same_values() and is_outside_same

    def _has_same_values(self) -> bool:
        """Whether no tensor was written whose values forward read; an attribute shows another tensor."""
        return all(value.is_same() for value in self._values)

    def changed(self) -> list[str]:
        """Returns what is another now, as a user writes it: attributes from the model on."""
        return [*self._attributes.changed(), *self._code.changed(), *self._hooks.changed()]


class _Value:
    """The values of a tensor at capture."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._before = weakref.ref(tensor), tensor.detach().clone()
        self._seen = self._state(tensor)

    def is_same(self) -> bool:
        """Whether the tensor has the same values, or is gone. Compares them only after a write."""
        tensor = self._tensor()
        if tensor is None or (now := self._state(tensor)) == self._seen:
            return True
        is_alike = (tensor.dtype, tensor.device) == (self._before.dtype, self._before.device)
        is_same = is_alike and tensor.equal(self._before)
        self._seen = now if is_same else self._seen
        return is_same

    @staticmethod
    def _state(tensor: torch.Tensor) -> tuple[int, int]:
        return tensor._version, tensor.data_ptr()


def _attributes(reads: Reads) -> list[Place]:
    """Returns the places of the attributes that forward read, in a module or its class."""
    found = []
    for key, path in reads.paths().items():
        if key in reads.carried:
            continue
        module = reads.modules[key[0]]
        if key in reads.missing:
            found += [Place(vars(module), key[1], path), Place(type(module), key[1], path)]
        else:
            found.append(Place(vars(module) if key[1] in vars(module) else module, key[1], path))
    for module in reads.elsewhere.values():  # a graph holds their buffers
        found += [Place(module._buffers, n, f"{type(module).__name__}.{n}") for n in module._buffers]
    return found


def _settled(
    places: list[Place], watched: Collection[int] = (), names: Collection[str] | None = None
) -> Places:
    settled = Places(names)
    for place in places:
        settled.add(place)
    settled.settle(watched)
    return settled


def _autograd(source: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[bool, list[bool]]:
    tensors = [*tree_leaves((args, kwargs)), *all_parameters(source)]
    return torch.is_grad_enabled(), [t.requires_grad for t in tensors if isinstance(t, torch.Tensor)]
