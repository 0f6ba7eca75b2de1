"""How threads wait for each other, and what they learn of each other by it.

Whoever waits learns what the others did before: every file here updates the clocks in `machine/`, by which
races are found.

| File | Holds |
|---|---|
| block_barriers | bar.sync and its forms for a block, bar.warp.sync, the barrier of a grid, fences |
| clusters | mapa, barrier.cluster, and accesses to another block's shared memory |
| mbarriers | mbarriers: arrivals and bytes of a phase, and who waits for it |
| async_groups | commit_group and wait_group of asynchronous operations, and their clocks |
| atomic_ordering | what threads learn from atomics: locks, flags, counters |
"""
