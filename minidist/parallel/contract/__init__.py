"""What layouts, strategies and engines promise each other."""
