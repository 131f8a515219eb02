"""The user's settings: the policy and its loss scale."""

from .loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from .policy import Policy

__all__ = ["DynamicLossScale", "NoLossScale", "Policy", "StaticLossScale"]
