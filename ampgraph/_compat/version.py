"""The version of torch."""

import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
