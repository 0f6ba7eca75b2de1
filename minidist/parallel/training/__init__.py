"""Around a step: precision, clipping, recomputation, random state."""
