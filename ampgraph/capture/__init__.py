"""From a model to the one IR: a pre-dispatch ATen graph with true metadata on every node."""

from .ahead import Captured, capture_program, normalize_program
from .bind import bind
from .just_in_time import lower_dynamo_graph

__all__ = ["Captured", "bind", "capture_program", "lower_dynamo_graph", "normalize_program"]
