"""ampgraph: automatic mixed precision as a graph-compiler pass on torch.fx."""

from .convert import convert
from .errors import AmpGraphError, CaptureError, PassError, PolicyError, VerifyError
from .guards import fp16_guard, fp32_guard
from .loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from .module import AmpModule
from .oplists import OpLists
from .plan import Cast, Decision, Plan
from .policy import Policy
from .program import export

__version__ = "0.1.0"

__all__ = [
    "AmpGraphError",
    "AmpModule",
    "CaptureError",
    "Cast",
    "Decision",
    "DynamicLossScale",
    "NoLossScale",
    "OpLists",
    "PassError",
    "Plan",
    "Policy",
    "PolicyError",
    "VerifyError",
    "StaticLossScale",
    "convert",
    "export",
    "fp16_guard",
    "fp32_guard",
]
