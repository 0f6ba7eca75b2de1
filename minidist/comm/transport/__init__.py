"""How collectives and messages travel between ranks, and how their algorithm is chosen.

A collective runs by torch.distributed, in memory that the ranks of one host share, or as an algorithm of
messages. A message goes through a mailbox in shared memory, or through torch.distributed.

- `algorithm_choice.py`: choose the algorithm of a collective; `using`, `empty_shared`
- `dispatch.py`: run a collective by the chosen algorithm, and count its bytes
- `background_thread.py`: run asynchronous collectives in the order of their calls
- `shared_memory.py`: the memory of a group's ranks on one host: headers, barriers, staging buffers
- `shared_collectives.py`: the collectives in that memory
- `hierarchical_all_reduce.py`: shared memory on each host, a ring between hosts
- `segments.py`: files in memory that several ranks map, and tensors in them
- `semaphores.py`: semaphores in shared memory, and a barrier made of them
- `hosts.py`: which ranks share a host
- `mailbox.py`, `mailbox_receiver.py`: a message through shared memory: its format, its sender, its receiver
- `mailbox_registry.py`: which messages use mailboxes, and where those are
- `gloo_workarounds.py`: a lean reduce-scatter for gloo, and the shape of its broadcast tree
- `duplicate_group.py`: another group of the same ranks
- `channel.py`: messages between the caller and a rank, over a socket
"""
