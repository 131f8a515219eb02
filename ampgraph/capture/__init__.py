"""Captures a model as the common IR: a pre-dispatch ATen graph with correct metadata on every node."""

from .ahead_of_time import capture_program
from .assigned import keep_before_assignment, keep_before_assignment_in
from .capture_mode import is_capturing_here
from .code import Code
from .converted_parts import differences, loses_scale, planned_by, refusal
from .distinct import distinct
from .just_in_time import lower_dynamo_graph
from .lost import LOST_KEY
from .reads import Reads
from .refusals import advice_of, check_nested, check_sparse
from .unlift import unlift

__all__ = [
    "LOST_KEY",
    "Code",
    "Reads",
    "advice_of",
    "capture_program",
    "check_nested",
    "check_sparse",
    "differences",
    "distinct",
    "is_capturing_here",
    "keep_before_assignment",
    "keep_before_assignment_in",
    "loses_scale",
    "lower_dynamo_graph",
    "planned_by",
    "refusal",
    "unlift",
]
