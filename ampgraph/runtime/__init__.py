"""What runs a converted model: which captured graph fits a call, its backend, its weights."""
