"""Importing torchvision beside a torch that it was not built for."""

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
    """Makes ``import torchvision`` work where its compiled operators do not fit the installed torch.

    A torchvision built for another torch cannot load its extension, and then fails at import because it
    describes operators that nobody has defined. Where the extension loads, nothing is done.
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
