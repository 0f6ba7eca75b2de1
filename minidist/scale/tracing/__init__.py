"""What every rank does in a step, on one time line."""
