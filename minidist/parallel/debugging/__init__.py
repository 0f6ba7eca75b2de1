"""Compare two layouts layer by layer, and assert that ranks hold the same model."""
