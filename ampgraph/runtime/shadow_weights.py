"""`ShadowWeights`: low-precision copies of float32 parameters, refreshed once per update.

The optimizer, checkpoints, clipping and averaging use the float32 parameters (master weights). A graph reads
the copies instead of casting the same parameters in every forward.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._compat import (
    data_of,
    keep_versions,
    no_selective_checkpoint,
    times_asked,
    times_asked_in_all,
    watch_data,
)
from ..proxy.all_parameters import all_parameters
from ..training.optimizer_steps import tell_after_steps

# Names of the inputs of a just-in-time graph that hold low copies.
SHADOW_PREFIX = "amp_shadow_"
# Keeps threads from reading a copy during a refresh. One lock for all models, which must stay copyable.
_lock = threading.RLock()


class _Shadow:
    """One parameter's copy, and the state of the parameter when the copy was made."""

    __slots__ = ("address", "asked", "master", "name", "version")

    def __init__(self, master: Tensor, name: str):
        self.master, self.name = weakref.ref(master), name
        self.version = self.address = self.asked = -1
        watch_data(master)

    def note_copy(self, master: Tensor) -> None:
        """Records that the copy has the parameter's values."""
        self.version, self.asked, self.address = master._version, times_asked(master), master.data_ptr()


class ShadowWeights(nn.Module):
    """The shadows of one model's parameters; graphs read them as its attributes.

    A shadow is stale when its parameter's version counter or memory moved (``load_state_dict``, averaging,
    edits in place), when its ``.data`` was asked for (a write through it raises no counter), when an
    optimizer of ``torch.optim`` stepped it (fused ones do not raise the counter), and when the model changed
    between training and evaluation (for writes through an older ``.data`` or numpy, which nothing records).
    Until an optimizer of ``torch.optim`` has stepped one of the parameters, the loop may update them by hand
    through an older ``.data``. Then every call after one with gradients refreshes all shadows.

    Args:
        model: The model, for its training flag.
        low_dtype: The copies' dtype.
    """

    _model: Callable[[], nn.Module | None]

    def __init__(self, model: nn.Module | None, low_dtype: torch.dtype):
        super().__init__()
        self.__dict__["_model"] = weakref.ref(model) if model is not None else lambda: None
        self._known = {id(p): weakref.ref(p) for p in all_parameters(model)} if model is not None else None
        modules = model.modules() if model is not None else ()
        self._places = [
            (places, name, id(value))
            for module in modules
            for places in (module._parameters, module._modules)
            for name, value in places.items()
        ]
        self._low_dtype = low_dtype
        self._shadows: dict[int, _Shadow] = {}
        self._numbers = itertools.count()
        self._all_stale = False
        self._asked = -1
        self._stepped = False
        self._mode: bool | None = None

    __hash__ = object.__hash__

    def accepts(self, value: object) -> bool:
        """Whether a value is a plain float32 parameter whose updates can be detected.

        Parameters added after the conversion do not count: ``fully_shard`` gathers new ones for each forward.
        """
        return (
            isinstance(value, nn.Parameter)
            and type(data_of(value)) is Tensor
            and value.dtype == torch.float32
            and not value.is_inference()
            and (self._known is None or self._known.get(id(value), lambda: None)() is value)
        )

    def are_in_place(self) -> bool:
        """Whether the model has the parameters and submodules that it had at conversion.

        ``torch.func.functional_call`` replaces them for one call, and ``fully_shard`` for every call.
        """
        return all(id(places.get(name)) == known for places, name, known in self._places)

    def name_of(self, master: Tensor) -> str:
        """Returns the attribute that holds the shadow of a parameter; creates the shadow if needed."""
        with _lock:
            shadow = self._shadows.get(id(master))
            if shadow is None or shadow.master() is not master:
                if not self._shadows:
                    tell_after_steps(self)
                shadow = self._shadows[id(master)] = _Shadow(master, f"weight_{next(self._numbers)}")
                self._copy([(shadow, master)])
            return shadow.name

    def of(self, master: Tensor) -> Tensor:
        """Returns the shadow of a parameter."""
        return getattr(self, self.name_of(master))

    def refresh(self) -> None:
        """Copies the parameters whose shadows are stale, all at once."""
        model = self._model()
        mode = model.training if model is not None else None
        with _lock:
            everything = self._all_stale or mode is not self._mode
            # A hand-written update may follow this call.
            self._all_stale, self._mode = torch.is_grad_enabled() and not self._stepped, mode
            if stale := self._stale(everything):
                self._copy(stale)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns every copy with its parameter."""
        found = [(getattr(self, s.name), s.master()) for s in self._shadows.values()]
        return [(copy, master) for copy, master in found if master is not None]

    def note_fresh(self) -> None:
        """Records that a graph has copied all parameters."""
        with _lock:
            self._all_stale = False
            for shadow in self._shadows.values():
                if (master := shadow.master()) is not None:
                    shadow.note_copy(master)

    def _stale(self, everything: bool) -> list[tuple[_Shadow, Tensor]]:
        stale = []
        asked = times_asked_in_all()
        is_asked, self._asked = asked != self._asked, asked
        for shadow in self._shadows.values():
            master = shadow.master()
            if master is None:
                continue
            is_moved = master._version != shadow.version or master.data_ptr() != shadow.address
            if everything or is_moved or (is_asked and times_asked(master) != shadow.asked):
                stale.append((shadow, master))
        return stale

    def after_step(self, optimizer: Optimizer, parameters: set[int]) -> None:
        """Called after the step of any optimizer."""
        with _lock:
            if not parameters.isdisjoint(self._shadows):
                self._all_stale = self._stepped = True

    def _copy(self, stale: list[tuple[_Shadow, Tensor]]) -> None:
        # A copy made under inference mode could not be saved for a backward.
        with torch.inference_mode(False), torch.no_grad(), no_selective_checkpoint():
            for shadow, master in stale:
                old = getattr(self, shadow.name, None)
                if old is None or (old.device, old.shape) != (master.device, master.shape):
                    new = torch.empty_like(master, dtype=self._low_dtype, requires_grad=False)
                    object.__setattr__(self, shadow.name, new)
            copies = [getattr(self, shadow.name) for shadow, _ in stale]
            # The same rule as for parameters: a backward may not follow an update that autograd has
            # seen, but may follow one that it has not seen.
            unseen = [c for c, (s, m) in zip(copies, stale, strict=True) if m._version == s.version]
            with keep_versions(unseen) if unseen else contextlib.nullcontext():
                torch._foreach_copy_(copies, [master for _, master in stale])
        for shadow, master in stale:
            shadow.note_copy(master)
