"""Pictures of a converted model. Nothing here needs Graphviz until a picture is rendered."""

from .annotated import to_networkx
from .draw import draw, notebook_svg, to_dot
from .model_explorer import to_model_explorer
from .render import can_render

__all__ = ["can_render", "draw", "notebook_svg", "to_dot", "to_model_explorer", "to_networkx"]
