"""The placement: its cost model, and the exact minimum that `place` asks for."""
