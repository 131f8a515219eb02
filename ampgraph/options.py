"""`Options`: how a converted model captures and runs, besides its policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .policy import Policy


@dataclass(frozen=True)
class Options:
    """What `ampgraph.convert` was asked for, checked and filled in.

    Attributes:
        policy: The policy, its dtype filled in.
        low_dtype: That dtype, float16 or bfloat16.
        backend: A name or function that ``torch.compile`` takes; ``"eager"`` runs the graph as it is.
        mode: The backend's mode.
        dynamic_shapes: As for ``torch.export.export``; ahead of time only.
        just_in_time: Whether Dynamo captures at each first call, for want of example inputs.
    """

    policy: Policy
    low_dtype: torch.dtype
    backend: str | Callable = "eager"
    mode: str | None = None
    dynamic_shapes: Any = None
    just_in_time: bool = False
