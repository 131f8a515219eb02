"""Converted parts of a model that is captured: one policy plans one graph, and theirs must agree with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..errors import CaptureError
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


def check_part(name: str, policy: Policy, has_fp16_guard: bool, stores_low: bool) -> None:
    """Refuses a converted part whose conversion decides other dtypes than the plan of the whole would.

    Args:
        name: What to call the part.
        policy: The policy of its conversion.
        has_fp16_guard: Whether its code has an `fp16_guard`, which would hold for the whole.
        stores_low: Whether level O3 stores parameters of it in the low dtype.

    Raises:
        CaptureError: The message lists what differs.
    """
    whole: Policy | None = getattr(_here, "policy", None)
    if whole is None:
        return
    pairs = [(field, getattr(policy, field), getattr(whole, field)) for field in _DECIDING]
    found = [_difference(field, mine, other) for field, mine, other in pairs if mine != other]
    found += [f"rules={dict(policy.rules)!r}"] if policy.rules else []
    found += ["an fp16_guard"] if has_fp16_guard else []
    found += ["parameters stored low"] if stores_low else []
    if found:
        raise CaptureError(f"{name} {ANOTHER_POLICY} than the model around it ({'; '.join(found)}).")


def _difference(field: str, mine: object, other: object) -> str:
    return field if field == "ops" else f"{field}={mine!r}, not {other!r}"
