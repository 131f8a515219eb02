"""`ModuleProxy`: a proxy that forwards parameters, state and attributes to the wrapped module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import CaptureError
from .bound_proxy import bound_proxy, is_method_of, rebound
from .module_parts import OF_EVERY_MODULE
from .special_methods import class_with_methods_of, follow_overrides

_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
)
# Hooks of ``state_dict`` and ``load_state_dict``, which are the source's.
_STATE_HOOKS = tuple(name for name in OF_EVERY_MODULE if "state_dict" in name)
# Methods about calls of the proxy: FSDP2's fully_shard, register_full_backward_hook, compile.
_OWN = ("__class__", "_is_full_backward_hook", "_compiled_call_impl")


@contextlib.contextmanager
def without_swapping() -> Iterator[None]:
    """Writes new values to parameters, also with ``set_swap_module_params_on_conversion(True)``.

    ``torch.utils.swap_tensors`` refuses parameters with weak references. A converted model has some: the
    capture, the loss scaler and the low copies of weights keep no parameter alive.
    """
    is_on = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(is_on)


@follow_overrides
class ModuleProxy(nn.Module):
    """Shares the source's parameters, buffers, submodules, training mode, attributes and state.

    Setting an attribute sets it on the source; the proxy's own attributes are in ``__dict__``. Methods of the
    source run with the proxy's forward.

    Attributes:
        source: The wrapped module.
    """

    # Attributes in ``__dict__`` that hide attributes of the source.
    _hides: ClassVar[tuple[str, ...]] = ("source",)

    def __new__(cls, source: nn.Module | None = None, *args: Any, **kwargs: Any) -> ModuleProxy:
        """Creates an object whose class has the source's special methods: ``len``, ``[]``, ``with``."""
        if not isinstance(source, nn.Module):  # learn2learn gives none, higher gives its parameters
            raise CaptureError(_no_copy(cls))
        return super().__new__(class_with_methods_of(type(source), cls))

    def __init__(self, source: nn.Module) -> None:
        self.__dict__["source"] = source
        training = source.training
        super().__init__()
        source.training = training  # nn.Module's own __init__ sets it
        shared = (*_SHARED, *_STATE_HOOKS)
        self.__dict__.update({name: source.__dict__[name] for name in shared if name in source.__dict__})

    @property
    def training(self) -> bool:
        return self.source.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.source.training = mode

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self.source.training = value
            return
        if name in _OWN:
            object.__setattr__(self, name, value)
            return
        self._check_not_own(name, "set it", " = ...")
        setattr(self.source, name, value)

    def __delattr__(self, name: str) -> None:
        self._check_not_own(name, "delete it")
        delattr(self.source, name)

    def _check_not_own(self, name: str, what: str, how: str = "") -> None:
        """Refuses to set a name that the proxy defines: the source would change, the proxy would not."""
        is_computed = isinstance(getattr(type(self), name, None), property)
        if is_computed or (name in self.__dict__ and name in self._hides):
            raise AttributeError(
                f"{name!r} is the converted model's own here; {what} on .source: .source.{name}{how}"
            )

    def __getattr__(self, name: str) -> Any:
        if isinstance(computed := getattr(type(self), name, None), property):
            return computed.__get__(self)  # raises the original error again
        source = self.__dict__.get("source")
        if source is None:  # something made the object without `__init__`
            what = f"this {type(self).__name__} has no model, and so no attribute {name!r}"
            raise AttributeError(f"{what}. {_no_copy(type(self))}")
        try:
            value = getattr(source, name)
        except AttributeError:
            raise AttributeError(f"{type(source).__name__!r} object has no attribute {name!r}") from None
        if not is_method_of(value, source):
            return value
        if not isinstance(self.__dict__.get("_bound_proxy"), type(source)):
            self.__dict__["_bound_proxy"] = bound_proxy(source, self)
        return rebound(value, self.__dict__["_bound_proxy"], self)

    def _get_name(self) -> str:
        """The source's: Hugging Face's Trainer shifts the labels of models with certain names."""
        name: str = self.source._get_name()
        return name

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.source)})

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Same as for the source."""
        return self.source.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Same as for the source."""
        with without_swapping():
            return self.source.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.source._load_from_state_dict(*args, **kwargs)

    def __prepare_scriptable__(self) -> Any:
        """Called first by ``torch.jit.trace`` and ``torch.jit.script``."""
        raise CaptureError(
            "TorchScript does not support converted models; use ampgraph.export(model, args) and "
            "torch.export.save."
        )


def _no_copy(cls: type) -> str:
    return (
        f"A new {cls.__name__} needs the module that it wraps. A library that copies a converted model part "
        "by part (higher, learn2learn) is not supported: the parameters of its copy would not be those of "
        "the graphs. Let it copy the source (model.source), or call the converted model with "
        "torch.func.functional_call. copy.deepcopy works, too."
    )


def source_of(module: nn.Module) -> nn.Module:
    """Returns the wrapped module of a proxy, which holds the state; any other module itself."""
    return module.source if isinstance(module, ModuleProxy) else module
