"""Modules that forward parameters, state and attributes to the module that they wrap."""
