"""How collectives and messages travel between ranks of one host: through memory that they share.

Everything else goes through torch.distributed. `choose` in collectives.py says which way a collective takes.

- `shared_memory.py`: the memory of a group's ranks on one host, and the collectives in it (`empty_shared`)
- `mailbox.py`: a message through shared memory: its format, its sender, its receiver; where mailboxes are
- `ipc.py`: primitives of inter-process communication: processes, files in memory, semaphores, a barrier
- `gloo_workarounds.py`: a lean reduce-scatter for gloo, and the shape of its broadcast tree
"""

STAGE = 2**20
"""Bytes of a staging buffer in shared memory; those of all ranks should fit into the last-level cache."""
