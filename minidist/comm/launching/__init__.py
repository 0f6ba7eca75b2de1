"""Start ranks on this machine, run functions on them, and bring back their results.

A supervisor process forks the ranks and kills them when the caller is gone; the caller sends functions to the
ranks over sockets, and reports the first rank that fails.

- `launch.py`: `minidist.launch`, one function on fresh ranks, or under torchrun
- `cluster.py`: `Cluster`, ranks that stay up between runs
- `rank_processes.py`: the caller's handles of the supervisor and of each rank's process
- `collect_results.py`: wait for the ranks; find the first failure, and word how a rank died
- `channel.py`: messages between the caller and a rank, over a socket
- `sending.py`: functions, results and handles of kept objects as bytes, with the source of notebook cells
- `supervisor.py`: runs in the supervisor process
- `worker.py`: runs in a rank
- `safeguards.py`: a process that starts must not launch ranks itself, and must die with its parent
- `cores.py`: how many cores this process may use
"""
