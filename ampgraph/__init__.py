"""ampgraph: automatic mixed precision as a graph-compiler pass."""
