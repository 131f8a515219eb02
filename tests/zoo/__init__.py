"""Whole models to test on, and torch's own CUDA autocast as an oracle that needs no GPU."""
