"""Graph to graph, one pass a file; the whole pipeline is the tuple in `default_pipeline`."""

from __future__ import annotations

import torch

from ampgraph.policy import Policy

from .base import Hook, Pass, Pins, Workspace, run_passes, workspace
from .boundary import ScaleLoss, is_boundary
from .classify import ClassifyOps
from .clean_casts import CleanCasts
from .explicit_casts import ExplicitCasts
from .inline_regions import InlineRegions
from .inline_transforms import InlineTransforms
from .insert_casts import InsertCasts, is_inserted_cast
from .normalize import Normalize
from .place import PlaceCasts
from .propagate import PropagatePins
from .remove_casts import RemoveCasts
from .shadow import ReadShadows
from .stored import ReadStored
from .verify import Verify

__all__ = [
    "ClassifyOps",
    "CleanCasts",
    "ExplicitCasts",
    "Hook",
    "InlineRegions",
    "InlineTransforms",
    "InsertCasts",
    "Normalize",
    "Pass",
    "Pins",
    "PlaceCasts",
    "PropagatePins",
    "ReadShadows",
    "ReadStored",
    "RemoveCasts",
    "ScaleLoss",
    "Verify",
    "Workspace",
    "default_pipeline",
    "is_boundary",
    "is_inserted_cast",
    "run_passes",
    "workspace",
]


def default_pipeline(
    policy: Policy,
    low_dtype: torch.dtype,
    modules: tuple[str, ...] = (),
    check_rules: bool = True,
    pins: Pins = (),
    edits: bool = True,
) -> tuple[Pass, ...]:
    """Returns the pipeline that `ampgraph.convert` runs on a captured graph.

    Args:
        policy: What the user wants.
        low_dtype: ``torch.float16`` or ``torch.bfloat16``.
        modules: Module paths of the source model, which rules may name.
        check_rules: Whether a rule that matches nothing is an error.
        pins: See `PropagatePins`.
        edits: Whether anything may go low; else the graph is planned, for the reasons, and stays as it is.
    """
    analysis = (
        ClassifyOps(policy.ops, low_dtype, policy.keep_io_dtypes),
        PropagatePins(policy, low_dtype, modules, check_rules, pins),
        PlaceCasts(policy, low_dtype),
    )
    if policy.level == "O0" or not edits:
        return analysis
    return (
        InlineRegions(low_dtype),
        InlineTransforms(),
        Normalize(),
        *analysis,
        InsertCasts(),
        CleanCasts(),
        Verify(policy.keep_io_dtypes),
    )
