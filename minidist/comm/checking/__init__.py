"""`check=True`: ranks compare their calls, and a mismatch or a deadlock is an error that names both sides.

Each rank writes a record of each call into the world's store (call_records.py), and compares it with the
others' (call_checker.py). A synchronous call waits for all ranks' records, even where the operation would
not, as in a broadcast (MPI 4.1, section 6.14, asks programs to bear either); an asynchronous one in
`Work.wait`. A call costs some hundred microseconds, outside the ledger. Calls outside minidist.comm are not
seen.

A rank that waits for long, or has left, also keeps a note in the store. The notes show that a rank has left,
or a circle of waiting ranks (the wait-for graph of Chandy, Misra and Haas 1983, "Distributed Deadlock
Detection"). A thread of each rank writes where its rank is.
"""

from __future__ import annotations

from minidist.comm.checking.call_checker import unordered as unordered
