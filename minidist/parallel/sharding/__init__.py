"""Data parallelism and ZeRO 1 to 3."""
