"""Records the Python state that forward reads during a capture: attributes of modules, and values.

A graph keeps the values that forward read at capture. Each call compares the recorded values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType

import torch
from torch import nn

from .._compat import FakeTensor
from ..own_files import TORCH
from ..proxy.module_parts import OF_EVERY_MODULE, TABLES
from ..proxy.module_proxy import source_of
from .code import Code
from .code_place import GONE, Place
from .containers import copied, has_plain_leaves, same
from .functions_run import FunctionsRun
from .held_objects import Change
from .outside_modules import OutsideModules
from .questions import Questions
from .user_code import is_foreign, is_set_by_torch

# What every module has: parameters, hooks, the training mode. A forward on a module is its own.
OF_NN_MODULE = frozenset({*OF_EVERY_MODULE, *vars(nn.Module)} - {"forward"})
Key = tuple[int, str]
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class Reads:
    """What forward reads during a capture, and what it sets.

    Attributes:
        modules: The modules that are watched, by ``id``.
        elsewhere: Those of them that the model does not name as its parts.
        outside: What the modules elsewhere held before forward changed anything.
        code: What forward's code reads outside of the modules.
        attributes: What was read before it was set, and a copy of the value where it is plain.
        missing: What was asked for, and was not there: ``getattr(self, "scale", None)``.
        carried: What was read and then set to something else: state that forward carries from call to call.
        lost: The part of it that is not a tensor and that torch's layers do not set.
        only_set: What else forward sets, as paths from the model: tensors, numbers, attributes of objects.
        values: Tensors that are no parameters or buffers, and whose values the code read as Python's.
        real: Tensors outside of the model that functions of torch got, by ``id``.
        asks: What else the model's code asks for.
        ran: The functions that ran.
    """

    def __init__(self, source: nn.Module) -> None:
        self._ordered = [source_of(module) for module in source.modules()]
        self.modules = {id(module): module for module in self._ordered}
        self._own = frozenset(self.modules)
        self._by_dict = {id(vars(module)): module for module in self._ordered}
        self._proxies: list[nn.Module] = []  # of modules of the model; no other object may get their id
        self.elsewhere: dict[int, nn.Module] = {}
        self.outside = OutsideModules()
        self.code = Code(source)
        self._source = source
        self.attributes: dict[Key, object] = {}
        self.missing: dict[Key, None] = {}
        self.carried: set[Key] = set()
        self.lost: dict[Key, Change] = {}
        self.only_set: dict[str, Change | None] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.real: dict[int, torch.Tensor] = {}
        self.asks = Questions()
        self.ran = FunctionsRun()
        self._set: set[Key] = set()
        self._set_first: set[Key] = set()
        self._set_by_torch: set[Key] = set()
        self._numbers: set[Key] = set()

    def counts(self, module: nn.Module, name: str) -> bool:
        """Whether an attribute may be a setting; the modes of the model's own modules are compared anyway."""
        return name not in OF_NN_MODULE or (name == "training" and id(module) not in self._own)

    def note_read(self, module: nn.Module, name: str, value: object) -> None:
        key = id(module), name
        if key in self._set_first:
            self._numbers.discard(key)  # forward set it for its own use
        if key in self.attributes or key in self._set_first or not self.watches(module):
            return
        is_settled = has_plain_leaves(value)
        if is_settled or name in vars(module):  # not methods, nor what is computed from other attributes
            self.attributes[key] = copied(value) if is_settled else value
        elif name != "forward" and _is_own_method(value, module):
            self.note_missing(module, name)  # an attribute of this name would hide the method

    def watches(self, module: nn.Module) -> bool:
        """Whether a module is the model's, or the user's elsewhere, which is watched from now on.

        It may be in a plain list, or a global.
        """
        if id(module) not in self.modules and _is_of_user(type(module)):  # type: ignore[arg-type]
            own = self._by_dict.get(id(vars(module)))
            if own is not None:  # a proxy of torch.fx
                self._proxies.append(module)
            else:
                self.elsewhere[id(module)] = module
                self.outside.add(module)
            self.modules[id(module)] = module if own is None else own
        return id(module) in self.modules

    def note_missing(self, module: nn.Module, name: str) -> None:
        """Records that a module has no such attribute; its parameters and submodules are structure."""
        held = vars(module)
        if self.watches(module) and not any(name in held[kind] for kind in TABLES):
            self.missing.setdefault((id(module), name))

    def of(self, other: nn.Module) -> Reads:
        """Returns the same reads of another model, of the structure that this one had at first."""
        moved = copy.copy(self)
        moved._source, moved._ordered = other, [source_of(module) for module in other.modules()]
        twins = {id(a): b for a, b in zip(self._ordered, moved._ordered, strict=True)}
        moved.modules = {id(twin): twin for twin in twins.values()}
        moved.attributes = {(id(twins[key]), name): v for (key, name), v in self.attributes.items()}
        moved.missing = {(id(twins[key]), name): None for key, name in self.missing}
        return moved

    def records(self) -> tuple[object, ...]:
        """Returns the containers that hold recorded values."""
        return self.attributes, self.lost, self.only_set, self.code.places

    def was_set(self, module: nn.Module, name: str) -> bool:
        """Whether forward assigned an attribute: ``module.name = value``."""
        return (id(module), name) in self._set

    def held(self) -> Iterator[Place]:
        """Yields where the model holds objects of the user's classes, which may keep values of a call."""
        for path, module in self._source.named_modules():
            attributes = vars(source_of(module))
            for name in [name for name, value in attributes.items() if _may_keep(value)]:
                yield Place(attributes, name, f"{path}.{name}".lstrip("."))

    def note_all(self, module: nn.Module) -> None:
        """Records all attributes of a module whose dict the model reads, and the keys it may ask for."""
        held = vars(module)
        for name in [name for name in held if name not in OF_NN_MODULE]:
            self.note_read(module, name, held[name])
        for name in sorted(self.code.strings - held.keys()):
            self.note_missing(module, name)

    def note_set(self, module: nn.Module, name: str, value: object) -> None:
        key = id(module), name
        if not self.watches(module):
            return
        self._set.add(key)
        is_number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
        if is_number and key not in self.attributes and not same(vars(module).get(name, GONE), value):
            self._numbers.add(key)  # code outside may read it
        if is_set_by_torch(sys._getframe(2)):
            self._set_by_torch.add(key)
        if key not in self.attributes:
            self._set_first.add(key)
        elif not same(self.attributes[key], value):
            self.note_carried(key, value)

    def note_carried(self, key: Key, value: object) -> None:
        self.carried.add(key)
        if not isinstance(value, torch.Tensor) and key not in self._set_by_torch:
            self.lost[key] = Change(self.attributes[key], value)

    def note_only_set(self, tensors: Iterable[str], in_objects: Mapping[str, Change]) -> None:
        """Records the attributes that forward sets, by path, except those of torch's own layers."""
        own = set(self._paths(self._set_by_torch).values())
        # ``torch.export`` exchanges parameters, and the list of them in an LSTM follows.
        recurrent = [name for name, m in self._source.named_modules() if isinstance(m, nn.RNNBase)]
        own |= {f"{name}._flat_weights".lstrip(".") for name in recurrent}
        paths = [*tensors, *self._paths(self._numbers).values()]
        self.only_set = {**{path: None for path in paths if path not in own}, **in_objects}

    def assigned_buffers(self) -> set[int]:
        """Returns the ids of the buffers that forward assigned: ``self.mean = new``."""
        held = ((self.modules[key]._buffers, name) for key, name in self._set)
        return {id(buffers[name]) for buffers, name in held if buffers.get(name) is not None}

    def lost_paths(self) -> list[str]:
        """Returns what forward reads and sets for its next call, in the model and outside of it."""
        return [*self._paths(self.lost).values(), *(place.path for place in self.code.changed())]

    def set_before_read(self) -> list[str]:
        """Returns the attributes that this capture set before it read them; torch's own layers left out."""
        return [*self._paths(self._set_first - self._set_by_torch).values()]

    def set_by_forward(self) -> list[str]:
        """Returns all that forward sets and a graph does not."""
        return [*self.only_set, *self.lost_paths()]

    def has_only_decided(self) -> bool:
        """Whether forward sets state for its next call, and all that it sets are decisions."""
        changes = [*self.lost.values(), *self.only_set.values()]
        return bool(changes) and all(change is not None and change.is_decision() for change in changes)

    @contextlib.contextmanager
    def decided(self) -> Iterator[None]:
        """Sets what forward has decided, as the model's next call would find it."""
        places = [(vars(self.modules[module]), name, change) for (module, name), change in self.lost.items()]
        before = [held.get(name, GONE) for held, name, _ in places]
        try:
            for held, name, change in places:
                held[name] = change.after
            yield
        finally:
            for (held, name, _), value in zip(places, before, strict=True):
                if value is GONE:
                    held.pop(name, None)
                else:
                    held[name] = value

    def forget_decisions(self) -> None:
        """Drops what forward sets; calls compare these attributes then."""
        self.carried -= self.lost.keys()
        self.lost.clear()
        self.only_set.clear()

    def paths(self) -> dict[Key, str]:
        """Returns the attributes that were read, or asked for, before they were set, as the user's paths."""
        return self._paths([*self.attributes, *(key for key in self.missing if key not in self._set)])

    def _paths(self, keys: Iterable[Key]) -> dict[Key, str]:
        names = {key: type(module).__name__ for key, module in self.elsewhere.items()}
        names |= {id(source_of(m)): name for name, m in self._source.named_modules()}
        for key, module in self.modules.items():  # proxies
            names.setdefault(key, names.get(id(module), type(module).__name__))
        return {key: f"{names[key[0]]}.{key[1]}".lstrip(".") for key in keys}

    def code_places(self) -> list[Place]:
        """Returns the places outside of the model that forward reads, except for those that it sets."""
        carried = [(id(place.holder), place.name) for place in self.code.changed()]
        return [place for key, place in self.code.places.items() if key not in carried]

    def note_values(self, tensors: Iterable[object]) -> None:
        """Records that Python got the values of tensors; those of the capture itself have none."""
        self.values |= {id(t): t for t in tensors if type(t) is torch.Tensor and not t.is_inference()}

    def note_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records what a function of torch got; those of the capture and of the model are fake."""
        self.real |= {id(t): t for t in tensors if not isinstance(t, FakeTensor)}


def _is_of_user(cls: type) -> bool:
    """Whether a class of modules is a layer of torch's or no class of torch's and ours at all."""
    return cls is not nn.Module and _is_place_of_user(cls.__module__)  # torch.export makes nn.Module


@functools.lru_cache(maxsize=4096)
def _is_place_of_user(name: str) -> bool:
    """Whether a Python module, by name, is one of torch's layers or neither torch's nor ampgraph's.

    No cache holds classes: torch.export makes some for each capture, and these must be freed.
    """
    root, _, rest = name.partition(".")
    return rest.startswith("nn.") if root == "torch" else root != "ampgraph"


def _may_keep(value: object) -> bool:
    is_of_user = not is_foreign(type(value)) and type(value) not in weakref.ProxyTypes
    return is_of_user and not isinstance(value, (nn.Module, torch.Tensor)) and hasattr(value, "__dict__")


def _is_own_method(value: object, module: nn.Module) -> bool:
    """Whether a value is a method of a module that is not written in torch."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    code = getattr(value.__func__, "__code__", None)
    return code is not None and not code.co_filename.startswith(TORCH)
