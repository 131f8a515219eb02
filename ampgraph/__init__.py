"""ampgraph: automatic mixed precision as a graph-compiler pass on torch.fx."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if not (Path(__file__).parent / "passes").is_dir():
    # In a clone or an editable install, the passes are beside the package.
    __path__.append(str(Path(__file__).parents[1]))

from . import testing
from .blocks import convert_blocks
from .convert import convert
from .drawing import draw, to_model_explorer, to_networkx
from .errors import AmpGraphError, CaptureError, NumericsError, PassError, PolicyError, VerifyError
from .export import export
from .guards import fp16_guard, fp32_guard
from .module import AmpModule
from .ops.lists import OpLists
from .plan import Cast, Decision, Plan
from .policy.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from .policy.policy import Policy
from .report.explain import explain
from .report.explanation import Explanation

if TYPE_CHECKING:
    from .numerics.calibrate import calibrate
    from .numerics.calibration import Calibration
    from .numerics.check import check_numerics
    from .numerics.compare import compare
    from .numerics.finding import Finding
    from .numerics.numeric_comparison import NumericComparison
    from .numerics.watch import Sighting, watch
    from .step.compile_step import CompiledStep, compile_step
    from .tune_model import tune

__version__ = "0.1.0"

__all__ = [
    "AmpGraphError",
    "AmpModule",
    "Calibration",
    "CaptureError",
    "Cast",
    "CompiledStep",
    "Decision",
    "DynamicLossScale",
    "Explanation",
    "Finding",
    "NoLossScale",
    "NumericComparison",
    "NumericsError",
    "OpLists",
    "PassError",
    "Plan",
    "Policy",
    "PolicyError",
    "Sighting",
    "StaticLossScale",
    "VerifyError",
    "calibrate",
    "check_numerics",
    "compare",
    "compile_step",
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
    "tune",
    "watch",
]

# Imported at their first use.
_LATER = {
    "Calibration": "numerics.calibration",
    "CompiledStep": "step.compile_step",
    "Finding": "numerics.finding",
    "NumericComparison": "numerics.numeric_comparison",
    "calibrate": "numerics.calibrate",
    "check_numerics": "numerics.check",
    "compare": "numerics.compare",
    "compile_step": "step.compile_step",
    "Sighting": "numerics.watch",
    "tune": "tune_model",
    "watch": "numerics.watch",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
