"""A sequence cut across ranks: ring attention, and a model on its share."""
