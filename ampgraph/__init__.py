"""ampgraph: automatic mixed precision as a graph-compiler pass on torch.fx."""

from pathlib import Path

if not (Path(__file__).parent / "passes").is_dir():
    # A clone, or an editable install of one: the passes lie beside the package.
    __path__.append(str(Path(__file__).parents[1]))

from . import testing
from .blocks import convert_blocks
from .convert import convert
from .drawing import draw, to_model_explorer, to_networkx
from .errors import AmpGraphError, CaptureError, PassError, PolicyError, VerifyError
from .export import export
from .guards import fp16_guard, fp32_guard
from .module import AmpModule
from .ops.lists import OpLists
from .plan import Cast, Decision, Plan
from .policy.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from .policy.policy import Policy
from .report.explain import explain
from .report.explanation import Explanation

__version__ = "0.1.0"

__all__ = [
    "AmpGraphError",
    "AmpModule",
    "CaptureError",
    "Cast",
    "Decision",
    "DynamicLossScale",
    "Explanation",
    "NoLossScale",
    "OpLists",
    "PassError",
    "Plan",
    "Policy",
    "PolicyError",
    "StaticLossScale",
    "VerifyError",
    "convert",
    "convert_blocks",
    "draw",
    "explain",
    "export",
    "fp16_guard",
    "fp32_guard",
    "testing",
    "to_model_explorer",
    "to_networkx",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
