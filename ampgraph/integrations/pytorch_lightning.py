"""``Trainer(plugins=[AmpGraphPrecision(dtype=torch.float16)])`` for the package ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.plugins.precision import Precision

from ._precision import PrecisionMixin


class AmpGraphPrecision(PrecisionMixin, Precision):  # type: ignore[misc]
    __doc__ = PrecisionMixin.__doc__
