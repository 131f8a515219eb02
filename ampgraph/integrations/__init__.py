"""Plugins for training frameworks; each module imports its framework, and nothing here imports them."""
