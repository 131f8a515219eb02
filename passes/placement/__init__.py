"""The placement: its cost model and its exact minimum."""
