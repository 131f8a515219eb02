"""A whole training step as one graph."""
