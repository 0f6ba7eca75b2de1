"""Checks of asynchronous accesses, and of kernels compiled with debug=True."""
