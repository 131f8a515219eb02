"""Chooses by measurement which nodes stay float32."""
