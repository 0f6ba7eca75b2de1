"""Fewer bytes for gradients: half precision, top-k, PowerSGD, sparse rows."""
