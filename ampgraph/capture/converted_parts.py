"""Converted parts of a model that is captured ahead of time.

One policy plans one graph. If the policy of a part says the same, the capture runs the part's source. If it
decides other dtypes, or somebody has edited the part's graph, the capture runs that graph, and what the graph
has in float32 stays so. A part is refused whose graph would lose something: its loss scale, an `fp16_guard`
(which would hold for the whole), a graph that is made at calls.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..errors import CaptureError
from ..policy.loss_scale import NoLossScale
from ..policy.policy import Policy

_here = threading.local()

# The advice belongs to errors with these words.
ANOTHER_POLICY = "was converted with another policy"
# The fields that decide dtypes. The backend chooses the objective; one loss scale holds for a whole graph.
_DECIDING = ("level", "dtype", "ops", "use_fp16_guard", "placement", "hazards")


@contextlib.contextmanager
def planned_by(policy: Policy) -> Iterator[None]:
    """Tells the converted parts of a model which policy plans the graph that this thread captures inside."""
    outer = getattr(_here, "policy", None)
    _here.policy = policy
    try:
        yield
    finally:
        _here.policy = outer


def differences(policy: Policy) -> list[str]:
    """Returns how a part's policy decides other dtypes than the plan of the whole would."""
    whole: Policy | None = getattr(_here, "policy", None)
    if whole is None:
        return []
    pairs = [(field, getattr(policy, field), getattr(whole, field)) for field in _DECIDING]
    found = [_difference(field, mine, other) for field, mine, other in pairs if mine != other]
    return [*found, f"rules={dict(policy.rules)!r}"] if policy.rules else found


def loses_scale(policy: Policy) -> bool:
    """Whether a part with this policy scales its loss, and the whole does not."""
    whole: Policy | None = getattr(_here, "policy", None)
    return whole is not None and _scales(policy) and not _scales(whole)


def refusal(name: str, differs: list[str]) -> CaptureError:
    """Returns the error for a part whose graph cannot be a piece of the graph of the whole."""
    return CaptureError(f"{name} {ANOTHER_POLICY} than the model around it ({'; '.join(differs)}).")


def _scales(policy: Policy) -> bool:
    return not isinstance(policy.active_loss_scale(), NoLossScale)


def _difference(field: str, mine: object, other: object) -> str:
    return field if field == "ops" else f"{field}={mine!r}, not {other!r}"
