"""`GuardScope`: whether a model has an `fp16_guard`, also outside of the graph that is captured now."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.fx import GraphModule

from ..errors import warn_user
from ..guards import LISTS, fp16_guard, has_guarded_region, mark_guarded_model
from ..policy.policy import Policy
from .code import Code


class GuardScope:
    """Marks the graphs of a model that has an `fp16_guard`: what lies outside of it runs in float32.

    A graph alone does not tell. Its call may go around the guard, and just in time the guard may lie in
    another graph of the call.

    Args:
        source: The model.
        policy: The policy of its conversion.
        is_block: Whether it is a block of a model; the guard may lie in another block.
    """

    def __init__(self, source: nn.Module, policy: Policy, is_block: bool = False) -> None:
        self._source = source
        self._is_forced = policy.use_fp16_guard is True
        is_open = policy.use_fp16_guard is None or (self._is_forced and not is_block)
        self._is_asked = is_open and policy.level != "O0"
        self._seen = self._is_told = False
        self._is_in_code: bool | None = None

    def has_guard(self) -> bool:
        """Whether the model has a guard that counts."""
        if self._is_in_code is None and self._is_asked:
            self._is_in_code = _names_a_guard(Code(self._source))
        return self._is_asked and (self._seen or bool(self._is_in_code))

    def mark(self, graph_module: GraphModule, code: Code | None = None) -> None:
        """Marks a graph before it is rewritten, if the model has a guard anywhere.

        Args:
            graph_module: The captured graph.
            code: The model's code, if it was read already.
        """
        if not self._is_asked:
            return
        self._seen |= has_guarded_region(graph_module)
        if self._is_in_code is None:
            self._is_in_code = _names_a_guard(code or Code(self._source))
        if self._seen or self._is_in_code:
            mark_guarded_model(graph_module.graph)

    def warn_if_unseen(self, name: str, rewritten: Iterable[GraphModule]) -> None:
        """Warns once if no graph so far has a guard, and the code has one or the policy asks for one."""
        if self._is_told or not self._is_asked or self._seen or self._is_in_code is None:
            return
        if not self._is_in_code:
            self._warn_if_nothing_is_low(name, rewritten)
            return
        self._is_told = True
        warn_user(
            f"{name} runs in float32: its code has an fp16_guard, which this call does not reach, and all "
            "ops outside of guards run in float32. Policy(use_fp16_guard=False) ignores guards."
        )

    def _warn_if_nothing_is_low(self, name: str, rewritten: Iterable[GraphModule]) -> None:
        if not self._is_forced:
            return
        self._seen = any(has_guarded_region(graph, LISTS) for graph in rewritten)
        if self._seen:  # a torch.autocast region of the model may run low, too
            return
        self._is_told = True
        warn_user(
            f"{name} runs in float32: Policy(use_fp16_guard=True) lets only code inside an fp16_guard "
            "run low, and the model has none. Leave use_fp16_guard out, or put a guard around such code."
        )


def _names_a_guard(code: Code) -> bool:
    wrapped = fp16_guard.__wrapped__  # type: ignore[attr-defined]
    return "fp16_guard" in code.names or code.reaches(fp16_guard, wrapped)
