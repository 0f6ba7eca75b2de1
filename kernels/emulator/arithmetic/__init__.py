"""Instructions that compute in registers, as NumPy operations."""
