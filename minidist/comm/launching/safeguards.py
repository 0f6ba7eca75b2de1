"""Safeguards: a process that starts launches no ranks, and dies with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

from minidist.comm.started_by import end_with

_PR_SET_PDEATHSIG = 1
_starting = False


def set_starting(now: bool) -> None:
    """Note whether this process is about to become a supervisor or a rank, and so must not launch ranks."""
    global _starting
    _starting = now


def check_not_starting() -> None:
    """RuntimeError while this process is being started: a script imported meanwhile would launch for ever."""
    if not _starting:
        return
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((package, "<frozen")):
        frame = frame.f_back
    culprit = frame.f_code.co_filename if frame is not None else "a script"
    raise RuntimeError(
        f"{culprit} was imported while ranks were being started, and launches ranks itself; it probably has "
        "the name of a module that others import, such as one of the standard library's: rename it"
    )


def die_with_parent(parent: int) -> None:
    """Have this process end with its parent; where the kernel cannot do it, a thread does within a second."""
    if not sys.platform.startswith("linux"):
        end_with(parent)
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)
