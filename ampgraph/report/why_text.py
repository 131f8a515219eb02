"""The answers to "why": of a cast, and of a node."""

from __future__ import annotations

from collections.abc import Sequence

from .rows import CastRow, NodeRow
from .tables import printable

# The links of a chain that are written out.
LINKS = 12


def why_cast(cast: CastRow) -> str:
    """Returns the reason for a cast."""
    return printable(_why_cast(cast))


def _why_cast(cast: CastRow) -> str:
    kind = ("clamped " if cast.clamped else "") + ("parameter" if cast.is_parameter else "activation")
    return "\n".join(
        (
            f"{cast.name}: casts {kind} {cast.tensor} from {cast.src} to {cast.dst}, {cast.bytes} bytes",
            f"  {cast.tensor} is {cast.src}: {cast.src_reason}",
            f"  {', '.join(cast.users)} needs {cast.dst}: {cast.dst_reason}",
        )
    )


def why_node(node: NodeRow, chain: Sequence[NodeRow], casts: Sequence[CastRow]) -> str:
    """Returns the reason for a node's dtype.

    Args:
        node: The node.
        chain: The node and the nodes that determine its dtype, see `Explanation.chain`.
        casts: The inserted casts that it reads.
    """
    what = (node.op or node.kind) + (f" in module {node.module!r}" if node.module else "")
    lines = [f"{node.label}: {what}, {node.dtype} {node.shape}", f"  decided by {node.by}: {node.reason}"]
    lines += [_link(n) for n in chain[1 : LINKS + 1]]
    if len(chain) > LINKS + 1:
        lines += [f"    .. {len(chain) - LINKS - 1} more, the last:", _link(chain[-1])]
    lines += [f"  reads {c.tensor} cast from {c.src} to {c.dst}" for c in casts]
    lines += [f"  widens {name} inside the kernel" for name in node.widens]
    if node.line:
        lines.append(f"  at {node.line}")
    return printable("\n".join(lines))


def _link(node: NodeRow) -> str:
    return f"    {node.label} is {node.dtype}, decided by {node.by}: {node.reason}"
