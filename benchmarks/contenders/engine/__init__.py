"""Contenders of ``whet bench engine``: models with random weights, and the engines that run them."""
