"""What the passes know of a graph: no file here edits one."""
