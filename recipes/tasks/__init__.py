"""Tasks: rows to prompt with and a reward for what comes back. Torch-free."""
