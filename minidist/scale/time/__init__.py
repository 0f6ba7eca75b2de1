"""Seconds of a step, from a model's shape, a layout and a machine."""
