"""Run a command of `minidist` in this process."""

from __future__ import annotations

import pytest

from minidist.cli.commands import main


def command(name: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Its exit code, and what it wrote on stdout and stderr."""
    with pytest.raises(SystemExit) as left:
        main([name, *words])
    out, error = capsys.readouterr()
    return int(left.value.code or 0), out, error
