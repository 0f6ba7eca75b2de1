"""A training's code run as one rank of any layout, alone and without data."""
