"""Barriers, and the happens-before order that finds races."""
