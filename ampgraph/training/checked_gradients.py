"""The gradients that the boundaries of one model have checked in the current backward.

If autograd stores a gradient unchanged, the gradient has the storage that left the boundary. A sum, a copy
or the result of a hook has another storage or a later version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .._compat import (
    current_backward,
    has_content,
    is_batched,
    is_compiling,
    leave_note,
    never_compiled,
    note_of,
)
from .pending_backwards import compiled_nodes

_LEFT = "_amp_left"


class CheckedGradients:
    """The gradients that left boundaries; only those of the last backward that had any.

    Each leaves a note with its memory. Memory whose writes nothing counts has none.
    """

    def __init__(self) -> None:
        self._last: tuple[int | None, set[int]] = (None, set())
        self._note = object()

    def note(self, slots: Iterable[int], gradients: Iterable[Tensor]) -> None:
        """Records gradients that leave a boundary now; no vmap has made them."""
        backward = current_backward()
        if backward is None:
            return
        if self._last[0] != backward:
            self._last, self._note = (backward, set()), object()
        reached, note = self._last[1], self._note
        for slot, gradient in zip(slots, gradients, strict=True):
            reached.add(slot)
            if has_content(gradient):
                leave_note(gradient, _LEFT, (note, slot))

    def take(self) -> set[int]:
        """Returns the slots of the gradients that left boundaries in the current backward."""
        (backward, reached), self._last = self._last, (None, set())
        return reached if backward is not None and backward == current_backward() else set()

    def is_checked(self, gradient: Tensor, slot: int) -> bool:
        """Whether a gradient left a boundary for this slot, in the backward of the last `take`."""
        return note_of(gradient, _LEFT) == ((self._note, slot), True)

    def follow(self, outputs: Any, probe: Tensor, slot_of: Callable[[Tensor], int | None]) -> None:
        """Records the gradients that a compiled graph's backward returns; its boundary runs no Python.

        Args:
            outputs: The outputs of the graph.
            probe: The probe that its boundary reports to.
            slot_of: Returns a parameter's slot.
        """
        if is_compiling():
            return
        for node in compiled_nodes(outputs):
            node.register_hook(self._after(weakref.ref(node), weakref.ref(probe), slot_of))

    def _after(self, node_ref: weakref.ref, probe_ref: weakref.ref, slot_of: Callable) -> Callable:
        this = weakref.ref(self)

        @never_compiled
        def note(gradients: tuple[Tensor | None, ...], _: object) -> None:
            checked, node, probe = this(), node_ref(), probe_ref()
            if checked is None or node is None or probe is None:
                return
            leaves = [getattr(following, "variable", None) for following, _ in node.next_functions]
            if not any(leaf is probe for leaf in leaves):
                return
            pairs = zip(leaves, gradients, strict=True)
            given = [(slot_of(leaf), g) for leaf, g in pairs if leaf is not None and g is not None]
            found = [(slot, g) for slot, g in given if slot is not None and not is_batched(g)]
            checked.note([slot for slot, _ in found], [g for _, g in found])

        return note
