"""What every instruction builds on: the registry, batches of lanes, PTX's types."""
