"""`launch` and `profile`, and the table of what a kernel did."""
