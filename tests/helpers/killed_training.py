"""Trainings, one after the other, in which ranks kill themselves: a program for torchrun, and no test.

The variable KILLS is a JSON list with one entry for each life: [rank, place, number], and that rank ends by
SIGKILL, as where memory runs out, in the life when it comes to the place for the number-th time. Places:
"step", before a step; "backward 1", in the middle of one of ZeRO stage 1; "write", before its part of a
checkpoint; "rename", between a checkpoint's last byte and its name; "time", so many seconds after its first
step began. Each argument is a training: a pickled description, in hexadecimal digits.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from minidist.checkpoint import folders, saving
from minidist.cli.train import TrainConfig, train
from minidist.comm.launching.launch import launch
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.sharding.sharded import Sharded

PLACES = {
    "step": (Engine, "step"),
    "time": (Engine, "step"),
    "backward 0": (Sharded, "begin_final_backward"),
    "backward 1": (Sharded, "begin_final_backward"),
    "backward 2": (Sharded, "begin_final_backward"),
    "backward 3": (Sharded, "begin_final_backward"),
    "write": (saving, "write_boxes"),
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


def dying_later(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    timer = threading.Timer(seconds, die)
    timer.daemon = True

    def call(*args: Any, **kwargs: Any) -> Any:
        if timer.ident is None:
            timer.start()
        return function(*args, **kwargs)

    return call


def train_all(configs: list[TrainConfig]) -> list[tuple[list[float], float]]:
    results = [train(config) for config in configs]
    return [(result.losses, result.test_loss) for result in results]


if __name__ == "__main__":
    lives = json.loads(os.environ["KILLS"])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life < len(lives) and lives[life][0] == int(os.environ["RANK"]):
        _, place, number = lives[life]
        owner, name = PLACES[place]
        how = dying_later if place == "time" else dying
        setattr(owner, name, how(getattr(owner, name), number))
    configs = [pickle.loads(bytes.fromhex(text)) for text in sys.argv[1:]]
    (found, *_) = launch(train_all, configs[0].layout.ranks, (configs,))
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
