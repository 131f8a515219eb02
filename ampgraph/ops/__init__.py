"""What is known of ATen: the op lists and the facts about kernels."""
