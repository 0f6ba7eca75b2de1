"""Starting ranks: supervisor, workers, warm clusters, and their results."""
