"""Graph to graph, one pass a file; `pipeline.default_pipeline` returns the whole pipeline."""

from .base import Hook, Pass, Pins, Workspace, run_passes, workspace
from .choose_gradients import ChooseGradients
from .choose_saved import ChooseSaved
from .classify import ClassifyOps
from .clean_casts import CleanCasts
from .explicit_casts import ExplicitCasts
from .fold_masks import FoldMasks
from .inline_regions import InlineRegions, has_writing_regions
from .inline_transforms import InlineTransforms
from .insert_casts import InsertCasts, is_inserted_cast
from .keep_read import KeepRead, reads_of_written_memory
from .lay_out_masks import LayOutMasks
from .normalize import Normalize
from .pipeline import default_pipeline, rewrite
from .place import PlaceCasts
from .propagate import PropagatePrecision
from .read_shadows import ReadShadows
from .read_stored import ReadStored
from .remove_casts import RemoveCasts
from .save_norms import SaveNorms
from .save_softmax import SaveSoftmax
from .scale_loss import ScaleLoss, is_boundary
from .verify import Verify
from .widen_gradients import WidenGradients

__all__ = [
    "ChooseGradients",
    "ChooseSaved",
    "ClassifyOps",
    "CleanCasts",
    "ExplicitCasts",
    "FoldMasks",
    "Hook",
    "InlineRegions",
    "InlineTransforms",
    "InsertCasts",
    "KeepRead",
    "LayOutMasks",
    "Normalize",
    "Pass",
    "Pins",
    "PlaceCasts",
    "PropagatePrecision",
    "ReadShadows",
    "ReadStored",
    "RemoveCasts",
    "SaveNorms",
    "SaveSoftmax",
    "ScaleLoss",
    "Verify",
    "WidenGradients",
    "Workspace",
    "default_pipeline",
    "has_writing_regions",
    "is_boundary",
    "is_inserted_cast",
    "reads_of_written_memory",
    "rewrite",
    "run_passes",
    "workspace",
]
