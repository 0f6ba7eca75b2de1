"""Measure the CUDA ladder one rung at a time, each in a process of its own, best rung first.

A kernel that never ends, or that writes where it must not, takes the GPU's context with it: nothing else
works in that process. In a process of its own it ends alone, and the next rung begins with a fresh context. A
process that stays silent is killed after `LIMITS`. Each process merges what it has measured into the results
file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from minidist.benchmarks.harness import formats
from minidist.benchmarks.harness.progress import Watcher
from minidist.kernels.cuda import RUNGS, attention

SUITE = "bench_cuda"
PROGRAM = (sys.executable, "-m", "minidist")
LIMITS = {False: 150.0, True: 400.0}  # seconds that a rung may take, in a quick run and in a full one
PART = 570.0  # seconds of one part: many machines end a call after ten minutes
SHORTEST = 30.0  # seconds; with less left, a part does not begin another rung
REAPED = 5.0  # seconds to wait for a killed process, which may hang in the GPU's driver


def of_part(names: Iterable[str], part: tuple[int, int]) -> list[str]:
    """Return the rungs that these benchmarks are named after, best first; of them, part i of n for (i, n)."""
    named = list(names)
    found = [rung for rung in reversed((*attention.RUNGS, *RUNGS)) if any(rung in name for name in named)]
    number, parts = part
    return found[len(found) * (number - 1) // parts : len(found) * number // parts]


@dataclass
class OneRungAtATime:
    """A pytest plugin that takes the CUDA ladder out of the run, and gives each of its rungs a process."""

    watcher: Watcher
    full: bool
    keyword: str
    out: Path
    part: tuple[int, int] = (1, 1)  # with more than one part, nothing goes on after PART seconds
    took_over: bool = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Measure the ladder; pytest's own loop goes on with the other benchmarks."""
        ladder = [item for item in session.items if item.path.stem == SUITE]
        if not ladder:
            return
        self.took_over = True
        session.items[:] = [item for item in session.items if item.path.stem != SUITE]
        with self.watcher.elsewhere(len(ladder)):
            self._measure(of_part((item.name for item in ladder), self.part))

    def _measure(self, rungs: Iterable[str]) -> None:
        latest = time.monotonic() + (PART if self.part[1] > 1 else float("inf"))
        for rung in rungs:
            left = latest - time.monotonic()
            if left < SHORTEST:
                self.watcher.skipped.append(f"{rung}: this part had no time left: run it with -k {rung}")
                continue
            failure = self.measure_one(rung, min(LIMITS[self.full], left))
            if failure:
                self.watcher.failed[f"{SUITE}.py::{rung}"] = failure

    def measure_one(self, rung: str, limit: float) -> str:
        """Run one rung's process for `limit` seconds at most; return how it failed as a whole, or ""."""
        selected = f"{rung} and ({self.keyword})" if self.keyword else rung
        words = ["bench", "cuda", "-k", selected, "--out", str(self.out), "--json", "--one-process"]
        process = subprocess.Popen(
            [*PROGRAM, *words, *(["--full"] if self.full else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.watcher.stream,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends that one
        )
        try:
            said = json.loads(process.communicate(timeout=limit)[0])
        except subprocess.TimeoutExpired:
            return f"no end after {formats.seconds(limit)}, so its process was killed"
        except ValueError:
            return f"its process ended with exit code {process.returncode} before it had results"
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(REAPED)
        for line in said["failed"]:
            name, _, reason = line.partition(": ")
            self.watcher.failed[f"{SUITE}.py::{name}"] = reason
        self.watcher.skipped += said["skipped"]
        return ""
