"""A launch: the grid, its machines, the schedule of their lanes, and the counts."""
