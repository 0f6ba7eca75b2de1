"""`minidist train` in which ranks kill themselves: a program for torchrun, and no test.

The variable KILLS is a JSON list with one entry for each life: [rank, place, number], and that rank ends by
SIGKILL, as where memory runs out, in the life when it comes to the place for the number-th time. Places:
"step", before a step; "backward", in the middle of one; "write", before its part of a checkpoint; "rename",
between a checkpoint's last byte and its name; "time", after so many seconds.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from minidist.checkpoint import folders
from minidist.checkpoint.storage import Writer
from minidist.cli import main
from minidist.parallel.hybrid import HybridEngine
from minidist.parallel.replicated import Replicated

PLACES = {
    "step": (HybridEngine, "step"),
    "backward": (Replicated, "announce"),
    "write": (Writer, "write_data"),
    "rename": (folders, "put_in_place"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            die()
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    lives = json.loads(os.environ["KILLS"])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life < len(lives) and lives[life][0] == int(os.environ["RANK"]):
        _, place, number = lives[life]
        if place == "time":
            timer = threading.Timer(number, die)
            timer.daemon = True
            timer.start()
        else:
            owner, name = PLACES[place]
            setattr(owner, name, dying(getattr(owner, name), number))
    main()
