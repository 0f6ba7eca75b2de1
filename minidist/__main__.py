"""The command line: `python -m minidist`, or `torchrun --nproc-per-node 2 -m minidist train --ranks 2`."""

from minidist.cli import main

main()
