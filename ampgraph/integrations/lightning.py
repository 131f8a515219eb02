"""``Trainer(plugins=[AmpGraphPrecision(dtype=torch.float16)])`` for Lightning.

If only the package ``pytorch_lightning`` is installed, the plugin works with it. If both are installed, use
`ampgraph.integrations.pytorch_lightning` for it.
"""

from __future__ import annotations

from ._precision import PrecisionMixin

try:
    from lightning.pytorch.plugins.precision import Precision
except ModuleNotFoundError:
    from pytorch_lightning.plugins.precision import Precision  # type: ignore[assignment]


class AmpGraphPrecision(PrecisionMixin, Precision):  # type: ignore[misc]
    __doc__ = PrecisionMixin.__doc__
