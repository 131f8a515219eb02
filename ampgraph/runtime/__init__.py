"""Runs a converted model: selects the captured graph for a call, its backend and its weights."""
