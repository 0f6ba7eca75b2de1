"""What the CPU ladder's upper rungs build on: register tile, packing, caches, threads, compilation."""
