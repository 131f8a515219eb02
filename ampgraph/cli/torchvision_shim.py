"""Imports a torchvision that was built for another torch."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import torch

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@functools.cache
def allow_torchvision() -> None:
    """Makes ``import torchvision`` work if its compiled operators do not fit the installed torch.

    A torchvision built for another torch cannot load its extension. Its import then fails, because it
    describes operators that are not defined. If the extension loads, this does nothing.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return
    namespace = torch.library.Library("torchvision", "DEF")
    for schema in _OPERATORS:
        namespace.define(schema)
    globals()["_namespace"] = namespace
