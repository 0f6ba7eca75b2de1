"""The command `minidist`, run in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minidist.cli import commands

Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(*words)` runs `minidist WORDS`; it returns the exit code and what was printed, and on stderr."""

    def run(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            commands.main(words)
        return ended.value.code, *capfd.readouterr()

    return run
