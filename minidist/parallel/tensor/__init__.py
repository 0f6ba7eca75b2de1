"""Tensor parallelism: column, row and vocabulary layers, and plans that name them."""
