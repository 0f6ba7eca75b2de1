"""What benchmarks share: the machine, programs run in turns, the steps that ranks time, the results."""
