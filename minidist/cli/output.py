"""Print results on stdout and errors as one line on stderr; and the option `--profile here`."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from minidist._files import check_file
from minidist.comm.started_by import started

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from minidist.scale.step_time.hardware import Hardware

HERE = "here"
"""The --profile for this machine, measured."""
MOST_HERE = 16
"""The most ranks that are started to measure it."""


def explain(error: Exception, words: Sequence[str] = ()) -> int:
    """Print an error of a command with these words in one line; return the exit code."""
    from minidist.comm.errors import RankCountError, RankError

    # click may be installed or vendored by typer, so its usage error is reached through typer's exports.
    usage_error = typer.BadParameter.__mro__[1]
    if isinstance(error, usage_error):
        context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
        given = [
            following
            for word, following in itertools.pairwise(" ".join(words).replace("=", " ").split())
            if parameter is not None and word in parameter.opts
        ]
        value = f", and it is {given[-1]}" if isinstance(error, typer.BadParameter) and given else ""
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        say(f"{message}{value} ({context.command_path if context else 'minidist'} --help)")
        return 2
    if isinstance(error, RankError):
        say(error.summary)
        return 1
    if isinstance(error, (ValueError, TypeError, ModuleNotFoundError)):
        if speaks() or not isinstance(error, RankCountError):  # all ranks have that one
            say(str(error))
        return 2
    if isinstance(error, OSError) and error.strerror:
        say(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
        return 1
    say(f"{type(error).__name__}: {error} (--debug shows where)")
    return 1


def require(command: str, *modules: str) -> None:
    """Raise ValueError if optional packages that a command needs are missing."""
    missing = [name.replace("_", "-") for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"minidist {command} needs {' and '.join(missing)}: pip install 'minidist[bench]'")


def say(message: str) -> None:
    """Print one line on stderr."""
    print(f"minidist: {' '.join(message.split())}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout, with null for NaN and infinity, which JSON does not have."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(text: str, **style: Any) -> None:
    """Print text on stdout without wrapping lines or interpreting brackets as markup."""
    console().print(text, highlight=False, markup=False, soft_wrap=True, **style)


def console(wide: bool = False) -> Any:
    """rich's console. A file or a pipe has no width of its own; `wide` gives it 140 columns."""
    from rich.console import Console

    found = Console()
    if wide and not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = 140
    return found


def speaks() -> bool:
    """Whether this process prints and writes; under torchrun, mpirun or srun only rank 0 does."""
    found = started()
    return found is None or found.rank == 0


def short(path: Path) -> str:
    """Return a path relative to the current directory if it lies there, or else as it is."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def waiting(words: str, quiet: bool) -> AbstractContextManager[Any]:
    """Show what the command waits for while the context is open, unless quiet."""
    return contextlib.nullcontext() if quiet else console().status(words)


def check_here(profile: str | None, ranks: int, figures: Path | None) -> None:
    """Raise ValueError for --figures without a measurement, or one that would start too many ranks."""
    if profile != HERE and figures is not None:
        asked = "no --profile is given" if profile is None else f"--profile is {profile}"
        raise ValueError(
            f"--figures is for this machine's figures and {asked}; leave it out, or give --profile {HERE}"
        )
    if figures is not None:
        check_file("--figures", figures)
    if profile == HERE and ranks > MOST_HERE:
        raise ValueError(
            f"measuring this machine would start {ranks} ranks; give at most {MOST_HERE}, or a machine by "
            "name, such as --profile h100"
        )


def measured(ranks: int, figures: Path | None, quiet: bool) -> Hardware:
    """Measure this machine with so many ranks, for --profile here; the file `figures` keeps the result."""
    from minidist.comm.launching.supervisor import preload_optimizers
    from minidist.scale.step_time.measure_machine import this_machine

    preload_optimizers()
    with waiting(f"measuring this machine with {ranks} ranks", quiet):
        return this_machine([ranks], figures)
