"""Finds objects that forward's code names and whose state Python does not show: iterators, arrays, schedules.

A graph would keep what forward got from them at capture, and no call could compare their state.
"""

from __future__ import annotations

import array
import configparser
import ctypes
import io
import multiprocessing.sharedctypes
import random
from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .code import Code
from .random_numbers import values_named, with_parts

_OPAQUE = (
    Iterator,
    array.array,
    bytearray,
    memoryview,
    configparser.RawConfigParser,
    ctypes._SimpleCData,
    ctypes.Array,
    ctypes.Structure,
    multiprocessing.sharedctypes.SynchronizedBase,
    random.SystemRandom,
    Optimizer,
    LRScheduler,
)


def opaque_objects(model: nn.Module, code: Code) -> list[str]:
    """Returns the paths of such objects in modules, globals and closures, also inside objects and lists.

    Args:
        model: The model.
        code: The code of its forward.
    """
    seen: set[int] = set()
    named = {place.path for place in code.places.values()}
    held = [part for value, path in values_named(model, code) for part in with_parts(value, path, seen)]
    return [
        path for value, path in held if _is_opaque(value) and (path in named or _name(path) in code.names)
    ]


def _name(path: str) -> str:
    """Returns the last attribute of a path, without keys: ``it`` of ``block.helper.it[0]``."""
    return path.partition("[")[0].rpartition(".")[2]


def _is_opaque(value: object) -> bool:
    return isinstance(value, _OPAQUE) and not isinstance(value, io.IOBase)  # files are iterators, too
