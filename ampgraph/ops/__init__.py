"""Knowledge of ATen: the op lists and the facts about kernels."""
