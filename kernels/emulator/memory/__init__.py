"""Global and shared memory: addresses, bounds, loads and stores, and who touched what last."""
