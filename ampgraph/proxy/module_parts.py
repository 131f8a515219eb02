"""The names under which ``nn.Module`` holds its parts."""

from __future__ import annotations

from torch import nn

# The dicts of what a module is made of; a TorchScript module has others.
TABLES = ("_parameters", "_buffers", "_modules")
# The dicts of hooks that run at a call or in its backward.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# What a module holds before its class adds anything.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
