"""What commands write, and how an error ends them: results on stdout, all else in a line on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minidist._files import check_file

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from minidist.scale.time.rates import Hardware

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")]
# Read by `cli.main` alone, which sees the errors.
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
HERE = "here"
"""The --profile that is this machine, measured."""
MOST_HERE = 16
"""Ranks that are started to measure it, at most."""


def explain(error: Exception) -> int:
    """Say an error in one line; return the exit code."""
    from minidist.comm.errors import RankError

    # typer either imports click or brings it along, so its usage error is reached through what typer itself
    # exports.
    usage_error = typer.BadParameter.__mro__[1]
    if isinstance(error, usage_error):
        say(f"{error.format_message()} (minidist --help)")  # type: ignore[attr-defined]
        return 2
    if isinstance(error, RankError):
        say(error.summary)
        return 1
    if isinstance(error, (ValueError, TypeError, ModuleNotFoundError)):
        say(str(error))
        return 2
    if isinstance(error, OSError) and error.strerror:
        say(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
        return 1
    say(f"{type(error).__name__}: {error} (--debug shows where)")
    return 1


def require(command: str, *modules: str) -> None:
    """ValueError where a command lacks optional packages."""
    missing = [name.replace("_", "-") for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"minidist {command} needs {' and '.join(missing)}: pip install 'minidist[bench]'")


def say(message: str) -> None:
    """One line on stderr."""
    print(f"minidist: {' '.join(message.split())}", file=sys.stderr)


def print_json(value: Any) -> None:
    """One object on stdout; NaN and infinity as null."""
    print(json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(text: str, **style: Any) -> None:
    """Text on stdout, as it is: a pipe gets whole lines, and brackets are no markup."""
    console().print(text, highlight=False, markup=False, soft_wrap=True, **style)


def console(wide: bool = False) -> Any:
    """rich's, for tables and colours. A file or a pipe has no width to keep to: `wide` gives it one."""
    from rich.console import Console

    found = Console()
    if wide and not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = 140
    return found


def speaks() -> bool:
    """Whether this process is the one that prints and writes: under torchrun rank 0 does so for all."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or not int(os.environ.get("RANK", "0"))


def short(path: Path) -> str:
    """A path as seen from here, where that is shorter."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def waiting(words: str, quiet: bool) -> AbstractContextManager[Any]:
    """Say what is waited for, while it is; nothing where quiet."""
    return contextlib.nullcontext() if quiet else console().status(words)


def check_here(profile: str | None, ranks: int, figures: Path | None) -> None:
    """ValueError where there are figures for no measurement, or too many ranks would be started for one."""
    if profile != HERE and figures is not None:
        asked = "no --profile is given" if profile is None else f"--profile is {profile}"
        raise ValueError(
            f"--figures are this machine's and {asked}; leave them out, or give --profile {HERE}"
        )
    if figures is not None:
        check_file("--figures", figures)
    if profile == HERE and ranks > MOST_HERE:
        raise ValueError(
            f"{ranks} ranks would be started to measure this machine; give at most {MOST_HERE}, or a machine "
            "by name, such as --profile h100"
        )


def measured(ranks: int, figures: Path | None, quiet: bool) -> Hardware:
    """This machine with so many ranks, as --profile here wants it; `figures` keeps what was measured."""
    from minidist.comm.launching.supervisor import preload_optimizers
    from minidist.scale.time.hardware import this_machine

    preload_optimizers()
    with waiting(f"measuring this machine with {ranks} ranks", quiet):
        return this_machine([ranks], figures)
