"""Asynchronous copies: cp.async, the copy engine, clusters."""
