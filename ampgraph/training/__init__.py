"""Loss scaling: the boundary of a graph, the scaler, and the steps that it skips."""
