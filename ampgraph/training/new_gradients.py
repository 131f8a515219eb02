"""Gradients that a backward of ours has just made: nothing else has them, so a kernel may write to them.

Autograd hands on the object that a backward returns. A sum of two gradients is another object.
"""

from __future__ import annotations

from torch import Tensor

_ATTRIBUTE = "_ampgraph_is_new"


def note_new(grad: Tensor) -> Tensor:
    """Notes that nothing else has a gradient, and returns it."""
    setattr(grad, _ATTRIBUTE, True)
    return grad


def is_new(grad: Tensor) -> bool:
    """Whether nothing else has a gradient; a fake tensor stands for others."""
    return type(grad) is Tensor and hasattr(grad, _ATTRIBUTE)


def forget_new(grad: Tensor) -> None:
    """Forgets it: somebody gets the gradient now."""
    delattr(grad, _ATTRIBUTE)
