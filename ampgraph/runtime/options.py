"""`Options`: the settings of a converted model: policy, backend and capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._compat import inductor_records_cuda_graphs
from ..errors import CaptureError, PolicyError, did_you_mean
from ..policy.policy import Policy

UNDECIDED = ""
AUTO, JUST_IN_TIME = "auto", "just in time"
CAPTURES = (AUTO, "ahead of time", JUST_IN_TIME)


@dataclass(frozen=True)
class Options:
    """The checked and completed arguments of `ampgraph.convert`.

    Attributes:
        policy: The policy, with its dtype filled in.
        backend: A name or function that ``torch.compile`` takes; ``"eager"`` runs the graph as it is.
            `UNDECIDED` as long as the device of a model without values is not known.
        mode: The backend's mode.
        dynamic_shapes: As for ``torch.export.export``; ahead of time only.
        capture: One of `CAPTURES`. Auto becomes just in time at the first call that needs it.
        block: The path of the converted block in the whole model, for `convert_blocks`; else ``""``.
    """

    policy: Policy
    backend: str | Callable = "eager"
    mode: str | None = None
    dynamic_shapes: Any = None
    capture: str = AUTO
    block: str = ""

    def named(self, message: str) -> str:
        """Returns a message for the user with the block's path in front."""
        return f"{self.block}: {message}" if self.block else message

    @property
    def is_decided(self) -> bool:
        """Whether dtype and backend are chosen; the device chooses what the user did not."""
        return self.policy.dtype is not None and self.backend != UNDECIDED

    @property
    def low_dtype(self) -> torch.dtype:
        """The policy's low dtype."""
        return self.policy.low_dtype

    @property
    def records_cuda_graphs(self) -> bool:
        """Whether the backend is known to record CUDA graphs, where there is CUDA."""
        if self.backend == "inductor":
            return inductor_records_cuda_graphs(self.mode)
        return self.backend == "cudagraphs"

    @property
    def may_rewrite_results(self) -> bool:
        """Whether a run of a graph may write to the tensors that the run before returned."""
        return self.records_cuda_graphs or callable(self.backend)

    @property
    def just_in_time(self) -> bool:
        """Whether Dynamo captures the model at its calls."""
        return self.capture == JUST_IN_TIME


def check_capture(capture: object) -> None:
    """Raises an error for an unknown way to capture.

    Raises:
        PolicyError: The message names the legal ones.
    """
    if capture not in CAPTURES:
        legal = ", ".join(map(repr, CAPTURES))
        hint = did_you_mean(capture, CAPTURES) if isinstance(capture, str) else ""
        raise PolicyError(f"capture={capture!r} is not a capture mode; legal: {legal}.{hint}")


def check_keywords(kwargs: object, function: str) -> None:
    """Refuses keyword arguments that are no dict: a policy in their place, for example.

    Raises:
        CaptureError: The message shows the options of the function by name.
    """
    if kwargs is None or isinstance(kwargs, Mapping):
        return
    raise CaptureError(
        f"kwargs is {kwargs!r}: pass a dict of example keyword arguments. Options have names: "
        f'{function}(model, args, policy="O2", dtype=torch.float16).'
    )
