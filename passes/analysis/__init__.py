"""Facts about a graph for the passes. No file here edits a graph."""
