"""The command `minidist`. It is the top floor: it imports the library, and nothing imports it.

Modules with a command import torch only when the command runs.

| File | Holds |
|---|---|
| commands.py | the commands train and doctor; the list of all commands; exit codes |
| compare.py, trace.py, bench.py, report.py, plan.py, dryrun.py | one command each |
| mistakes.py, judge.py, lessons.py | one command each |
| lessons_export.py | the lessons as assignments for nbgrader and Otter-Grader |
| own_model.py | the functions of a model of your own, which options name |
| options.py, output.py | options that commands share; what they print |
| train_config.py | `TrainConfig`: a description of a run; the model, data and engine that it describes |
| train.py, resuming.py | what the commands train, compare and trace run; checkpoints |
| doctor.py | what `minidist doctor` finds, and what it prints of that |
| doctor_probe.py | what it loads in another process |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.cli.commands import app as app

__getattr__, __dir__, __all__ = lazy(__name__)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit. `arguments` are the words after `minidist`; None for the process's own."""
    try:
        from minidist.cli import commands

        commands.main(arguments)
    except KeyboardInterrupt:  # the libraries of the command line take a tenth of a second to load
        print("minidist: stopped", file=sys.stderr)
        sys.exit(130)
