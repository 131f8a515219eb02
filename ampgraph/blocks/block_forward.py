"""`BlockForward`: the ``forward`` of a converted block; it can restore the original ``forward``."""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._compat import apart_from_dynamo, calling_module, is_copy, is_exporting, module_that_calls
from ..errors import AmpGraphError, NoGraphError, warn_user
from ..module import AmpModule
from ..proxy.bound_proxy import behind_the_scenes, over_dict_of
from ..runtime.backends import decided
from ..runtime.device import device_of
from ..runtime.options import Options
from ..runtime.siblings import Siblings
from ..training.scaler import LossScaler

# Instance attributes that may hold a forward. Accelerate's hooks set ``forward`` and call ``_old_forward``:
# a hook moves arguments and loads weights, and has to run at every call.
_PLACES = ("_old_forward", "forward")
# Creates an object without its constructor; pickle finds this function by its name.
_NEW_OBJECT: Callable = vars(copyreg)["__newobj__"]
# Hooks that ``nn.Module.__call__`` runs around forward.
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_")))


class BlockForward:
    """Replaces a block's ``forward`` and runs the converted block.

    Attributes:
        block: The block.
        path: Its path in the whole model.
        options: The conversion options.
        scaler: The loss scaler of the whole model.
        siblings: The captures of all blocks; blocks that are alike use one.
        stored_low: Paths of the parameters that a converted block stores in the low dtype; None before its
            first capture, which decides it.
        original: The forward that was patched onto the block; the conversion uses it. None if the block uses
            the forward of its class.
        is_restored: Whether the block has its original forward again. A wrapper may still call this object.
    """

    def __init__(self, block: nn.Module, path: str, options: Options, scaler: LossScaler, siblings: Siblings):
        self.block, self.path, self.options, self.scaler = block, path, options, scaler
        self.siblings = siblings
        self.stored_low: tuple[str, ...] | None = None
        self.original: Callable | None = vars(block).get(_place(block))
        self.is_restored = self._told_copy = False
        self.__signature__ = inspect.signature(self.original or block.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            return self._run_apart(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # a strict export; it traces no frames
            return self._run(*args, **kwargs)
        if (caller := calling_module()) is self.block:  # nearly always
            return self._run(*args, **kwargs)
        return self._run_for(caller, *args, **kwargs)

    def _run_for(self, caller: nn.Module | None, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the block, or the copy of it that calls this."""
        if caller is None or caller is self.block or not is_copy(caller, self.block):
            return self._run(*args, **kwargs)
        return self._run_copy(caller, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_restored:
            return self._run_original(*args, **kwargs)
        device = device_of(self.block, self.scaler.state.scale.device)
        if not self._is_decided():  # on meta: nothing is computed, and outputs keep their dtypes
            return self._run_original(*args, **kwargs)
        amp = self.amp
        if type(self.block) is not self._class:
            self._follow_class()
        self.scaler.move(device)
        try:
            return amp(*args, **kwargs)
        except AmpGraphError as error:
            raise type(error)(f"{self.path or 'model'}: {error}") from error

    # torch.compile around the block must not trace into it; the same holds for an AmpModule.
    @apart_from_dynamo
    def _run_apart(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_for(module_that_calls(type(self).__call__.__code__), *args, **kwargs)

    def _run_copy(self, copied: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a copy of the block, which has this forward and perhaps other parameters."""
        if not self._told_copy:
            self._told_copy = True
            warn_user(
                f"{self.path or 'the model'} was converted with convert_blocks, and a shallow copy of it "
                "(copy.copy, nn.DataParallel, or a copy with other parameters that a library makes) runs "
                "unconverted. Use copy.deepcopy or torch.func.functional_call."
            )
        return self._original_of(copied)(*args, **kwargs)

    def _original_of(self, copied: nn.Module) -> Callable:
        """Returns the original forward of the block as a method of a copy."""
        if isinstance(self.original, types.MethodType) and self.original.__self__ is self.block:
            return types.MethodType(self.original.__func__, copied)
        if self.original is not None:
            return self.original
        # A generated class may leave the forward to the attribute.
        is_missing = type(copied).forward is nn.Module.forward
        forward: Callable = (type(self.block) if is_missing else type(copied)).forward
        return types.MethodType(forward, copied)

    def _run_original(self, *args: Any, **kwargs: Any) -> Any:
        return (self.original or type(self.block).forward.__get__(self.block))(*args, **kwargs)

    def _is_decided(self) -> bool:
        """Chooses dtype and backend if the model was converted without values; False while it has none.

        All blocks choose for the same device: they have one loss scale.
        """
        if self.options.is_decided:
            return True
        if (device := self.scaler.device_of_values()) is None:
            return False
        options = decided(self.options, device)
        options.policy.check_outputs("convert_blocks")
        self.options = options
        return True

    @functools.cached_property
    def amp(self) -> AmpModule:
        """The converted module."""
        if not self._is_decided():
            raise NoGraphError(
                f"{self.path or 'the model'} has no values yet (device meta); its first call captures it."
            )
        self._class = type(self.block)
        bare = over_dict_of(self.block, _bare_class(self))
        # A forward that was patched onto a block may belong to this block alone.
        siblings = self.siblings if self.original is None else None
        return AmpModule(bare, self.options, self.stored_low, self.scaler, siblings)

    def _follow_class(self) -> None:
        """Follows a change of the block's class: ``fully_shard`` and parametrizations change it in place."""
        amp, self._class = self.amp, type(self.block)
        object.__setattr__(amp.source, "__class__", _bare_class(self))

    def install(self) -> None:
        """Replaces the block's forward."""
        setattr(self.block, _place(self.block), self)

    def restore(self) -> None:
        """Puts the block's original forward back."""
        self.is_restored = True
        state = vars(self.block)
        for place in _PLACES:
            if state.get(place) is not self:
                continue
            if self.original is not None:
                state[place] = self.original
            elif place == "forward":
                del state[place]
            else:  # Accelerate's hook came after the conversion
                state[place] = type(self.block).forward.__get__(self.block)

    def __getstate__(self) -> dict[str, Any]:
        # copy copies the forward before the block is complete, so the copy converts the block on demand.
        state = {name: value for name, value in vars(self).items() if name not in ("amp", "_class")}
        return {**state, "stored_low": self.amp._decided_low if self._is_decided() else None}


def converted_forward(module: nn.Module) -> BlockForward | None:
    """Returns the `BlockForward` of a converted block, also from below other wrappers, or None."""
    found = (f for place in _PLACES for f in _unwrapped(vars(module).get(place)))
    return next((f for f in found if isinstance(f, BlockForward) and not f.is_restored), None)


def _unwrapped(function: object) -> Iterator[object]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _place(block: nn.Module) -> str:
    """Returns the attribute that holds the forward."""
    is_hooked = "_hf_hook" in vars(block) and "_old_forward" in vars(block)
    return "_old_forward" if is_hooked else "forward"


def _bare_class(converted: BlockForward) -> type[nn.Module]:
    """Returns a class for an object that shares a block's ``__dict__`` and calls only its original forward.

    Hooks, a compiled call and a ``__call__`` of the block's class run around the converted forward, so the
    captured object must not run them.
    """
    cls, original = type(converted.block), converted.original
    hooks: dict[str, OrderedDict] = {name: OrderedDict() for name in _HOOKS}

    def forward(self: nn.Module) -> Callable:
        if original is None:
            forward: Callable = super(made, self).forward
            return forward
        if isinstance(original, types.MethodType) and original.__self__ is converted.block:
            return types.MethodType(original.__func__, self)
        return original

    def reduced(self: nn.Module, protocol: object) -> tuple:
        state = {name: value for name, value in vars(self).items() if value is not converted}
        return _NEW_OBJECT, (cls,), state if original is None else {**state, "forward": original}

    def hook_of(name: str) -> property:
        return property(lambda _: hooks[name])

    members: dict[str, Any] = {name: hook_of(name) for name in _HOOKS}
    members |= {
        "__call__": nn.Module.__call__,
        "__reduce_ex__": reduced,
        "_compiled_call_impl": property(lambda _: None),
        "forward": property(forward),
    }
    made: Any = behind_the_scenes(cls, members)
    return made
