"""Pictures of a converted model. Nothing here needs Graphviz until a picture is rendered."""

from .annotated import to_networkx
from .draw import draw, notebook_svg, to_dot
from .render import can_render

__all__ = ["can_render", "draw", "notebook_svg", "to_dot", "to_networkx"]
