"""Finds objects that forward's code names and whose state Python does not show: iterators, events, schedules.

A graph would keep what forward got from them at capture, and no call could compare their state.
"""

from __future__ import annotations

import array
import configparser
import ctypes
import io
import multiprocessing.sharedctypes
import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..proxy.module_parts import OF_EVERY_MODULE
from .code import Code
from .containers import is_container, is_small, items_of

_OPAQUE = (
    *(Iterator, array.array, bytearray, memoryview, configparser.RawConfigParser, ctypes._SimpleCData),
    *(ctypes.Array, ctypes.Structure, multiprocessing.sharedctypes.SynchronizedBase, queue.Queue),
    *(queue.SimpleQueue, random.SystemRandom, threading.Event, Optimizer, LRScheduler),
)


def opaque_objects(model: nn.Module, code: Code) -> list[str]:
    """Returns the paths of such objects in modules, globals and closures, also in lists and dicts.

    Args:
        model: The model.
        code: The code of its forward.
    """
    held = [
        (value, f"{path}.{name}".lstrip("."))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name in code.names and name not in OF_EVERY_MODULE
    ]
    named = [(place.value(), place.path) for place in code.places.values()]
    return [path for value, path in (*held, *named) if any(map(_is_opaque, _with_items(value)))]


def _with_items(value: Any) -> list[Any]:
    if is_container(value):
        return [item for _, item in items_of(value)] if is_small(value) else []
    return [value]


def _is_opaque(value: object) -> bool:
    return isinstance(value, _OPAQUE) and not isinstance(value, io.IOBase)  # files are iterators, too
