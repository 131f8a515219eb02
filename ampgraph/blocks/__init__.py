"""Converts submodules of a model in place."""

from .in_place import Blocks, Which, convert_blocks

__all__ = ["Blocks", "Which", "convert_blocks"]
