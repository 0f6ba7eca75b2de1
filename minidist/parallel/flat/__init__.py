"""Many parameters in one flat tensor: buckets, and ranges of them."""
