"""Measures the effect of low precision on values, and finds fixes."""
