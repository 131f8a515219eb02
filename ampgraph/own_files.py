"""The folders of torch, ampgraph and Python; a file outside of them is the user's."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch

# Each ends with a separator: torchvision lies beside torch.
TORCH = str(Path(torch.__file__).parent) + os.sep
AMPGRAPH = str(Path(__file__).parent) + os.sep
PYTHON = sysconfig.get_path("stdlib") + os.sep


def is_pythons(filename: str) -> bool:
    """Whether a file belongs to Python's library, not to an installed package."""
    return filename.startswith(PYTHON) and "-packages" + os.sep not in filename


def is_users(filename: str) -> bool:
    """Whether a file of Python code is neither torch's, nor ampgraph's, nor Python's."""
    is_code = filename.endswith(".py") and not filename.startswith((TORCH, AMPGRAPH))
    return is_code and not is_pythons(filename)
