"""The contenders of ``whet bench engine``: models with random weights, and each engine's way to run them."""
