"""`check=True`: ranks compare their calls, and a mismatch or a deadlock is an error that names both sides.

call_records         what a rank tells the others of a call; which calls contradict each other or are swapped
compare_calls        exchanges the records through the world's store, and compares them before a call begins
deadlock_detection   why a rank does not come: it left, waits in a circle, or is stuck at a line
"""

from minidist.comm.checking.compare_calls import enter, run, start, stop

__all__ = ["enter", "run", "start", "stop"]
