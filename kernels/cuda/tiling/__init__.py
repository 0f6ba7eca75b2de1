"""Tiles of matrices in shared memory and registers: how they are loaded, ordered and stored."""
