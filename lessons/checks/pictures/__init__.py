"""Pictures of single lessons that would be too long for a cell: one function each, which shows it."""
