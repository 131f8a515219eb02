"""Notices that forward draws from a random generator that a graph cannot draw from, or seeds torch's.

Tracing does not see Python's and numpy's generators, nor seeds: a graph keeps what was drawn at capture. It
sees a ``torch.Generator``, and cannot run it.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, FrameType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._compat import replaced
from ..own_files import is_users
from ..proxy.module_parts import OF_EVERY_MODULE
from .code import Code
from .containers import has_plain_leaves
from .user_code import frames, is_foreign

# How deep a generator may lie in objects that a module holds or forward's code names.
_DEEP = 3
_MANY = 256
_SEEDS = ("manual_seed", "seed", "set_state")
_DYNAMO = "/torch/_dynamo/"


@contextlib.contextmanager
def noting_random_numbers(
    places: Iterable[tuple[Any, str]], is_capturing: Callable[[], bool]
) -> Iterator[RandomNumbers]:
    """Yields what collects the use of generators by the code inside; sets them back.

    Args:
        places: Values that may be or hold generators, with their names.
        is_capturing: Whether what happens now counts.
    """
    found: list[str] = []

    def note(what: str) -> None:
        if is_capturing() and what not in found:
            found.append(what)

    seen = {id(generator) for generator in _global_generators()}
    held = [part for value, name in places for part in with_parts(value, name, seen)]
    generators = [*_generators(), *(_Generator.of(value, name) for value, name in held)]
    before = [(each, each.get()) for each in generators if each is not None]
    seeded = torch.random.default_generator
    watched = _WatchedSeeds(seeded, note, is_capturing)
    names = {id(value): name for value, name in reversed(held)}
    try:
        with replaced(torch.random, "default_generator", watched):
            yield RandomNumbers(found, names, note)
    finally:
        if watched.before is not None:
            seeded.set_state(watched.before)
        for generator, state in before:
            if generator.get() != state:
                note(f"draws from {generator.name}")
                generator.put(state)


class _Generator(NamedTuple):
    """A generator outside of torch."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]

    @classmethod
    def of(cls, value: Any, name: str) -> _Generator | None:
        if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            return cls(f"{name} (random.Random)", value.getstate, value.setstate)
        numpy = sys.modules.get("numpy")
        if numpy and isinstance(value, numpy.random.RandomState):
            title = f"{name} (numpy.random.RandomState)"
            return cls(title, lambda: _listed(value.get_state()), value.set_state)
        if numpy and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            return cls(
                f"{name} (numpy.random.Generator)",
                lambda: {**bits.state},
                lambda state: setattr(bits, "state", state),
            )
        return None


def _generators() -> Iterator[_Generator]:
    yield _Generator("random", random.getstate, random.setstate)
    if numpy := sys.modules.get("numpy"):
        state = numpy.random
        yield _Generator("numpy.random", lambda: _listed(state.get_state()), state.set_state)


def values_named(model: nn.Module, code: Code) -> Iterator[tuple[Any, str]]:
    """Yields what modules hold and forward's code names, with its name."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                yield value, f"{path}.{name}".lstrip(".")
    for place in code.places.values():
        yield place.value(), place.path


def _global_generators() -> Iterator[object]:
    """Yields what `_generators` has already: the objects behind `random` and ``numpy.random``."""
    yield random.random.__self__  # type: ignore[attr-defined]
    if numpy := sys.modules.get("numpy"):
        yield numpy.random.rand.__self__


def with_parts(value: Any, name: str, seen: set[int], depth: int = _DEEP) -> Iterator[tuple[Any, str]]:
    """Yields a value and what its containers and attributes hold, with their names.

    Args:
        value: Any value.
        name: Its name.
        seen: The ids of objects to leave out; gets those that are yielded.
        depth: How deep to look.
    """
    if id(value) in seen or has_plain_leaves(value) or isinstance(value, (nn.Module, ModuleType, type)):
        return
    seen.add(id(value))
    yield value, name
    if isinstance(value, (list, tuple)):
        parts = {f"{name}[{index}]": part for index, part in enumerate(value[:_MANY])}
    elif isinstance(value, dict):
        parts = {f"{name}[{key!r}]": part for key, part in [*value.items()][:_MANY]}
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        parts = {name: value.__self__}
    elif is_foreign(type(value)):
        return
    else:
        parts = {f"{name}.{key}": part for key, part in [*getattr(value, "__dict__", {}).items()][:_MANY]}
    if depth:
        for key, part in parts.items():
            yield from with_parts(part, key, seen, depth - 1)


def _listed(state: Any) -> tuple:
    """Returns a state of numpy as numbers, which compare at once: the key, and the place of the next draw."""
    name, key, *rest = state
    return name, key.tolist(), *rest


class RandomNumbers:
    """Collects what forward does to generators, in words."""

    def __init__(self, found: list[str], names: dict[int, str], note: Callable[[str], None]) -> None:
        self.found, self._names, self._note = found, names, note

    def note_draw(self, generator: object) -> None:
        """Records a call of torch with a ``torch.Generator``."""
        name = self._names.get(id(generator), "a generator")
        self._note(f"draws from {name} (torch.Generator{users_line(frames())})")


class _WatchedSeeds:
    """torch's generator; records that the model's code seeds it.

    Attributes:
        before: Its state before the first seed in a thread that captures; None without one.
    """

    def __init__(
        self, generator: torch.Generator, note: Callable[[str], None], is_capturing: Callable[[], bool]
    ) -> None:
        self._generator, self._note, self._is_capturing = generator, note, is_capturing
        self.before: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name in _SEEDS and (line := users_line(frames())):
            if self._is_capturing() and self.before is None:
                self.before = self._generator.get_state()
            self._note(f"seeds torch's generator ({line.removeprefix(', ')})")
        return getattr(self._generator, name)


def users_line(around: Iterable[FrameType]) -> str:
    """Returns the innermost line of the user's code; ``""`` if Dynamo itself is at work inside of it."""
    for frame in around:
        file = frame.f_code.co_filename
        if is_users(file):
            return f", {file}:{frame.f_lineno}"
        if _DYNAMO in file and not file.endswith("eval_frame.py"):
            return ""
    return ""
