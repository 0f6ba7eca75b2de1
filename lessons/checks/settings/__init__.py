"""Settings: what a rank sets up around the reader's function, so that a check sees more than its result.

A setting is called as setting(function, *args) in each rank. It may make views, call backward, or count
memory, and returns what the check compares. Beside this file stands a module for each lesson whose settings
are more than a few lines; it also draws the inputs of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from checks.ranks import Case, Run, on_ranks
from checks.support.answers import Answer


@dataclass
class Driver:
    """In a rank: calls the setting with the reader's `function`."""

    function: Callable[..., Any]
    setting: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """What the setting makes of it."""
        return self.setting(self.function, *args)


def driven(
    answer: Answer, setting: Callable[..., Any], cases: Sequence[Case], only: Sequence[str] = ()
) -> list[Run]:
    """Run cases in a setting, each rank in its own process; see `on_ranks`."""
    return on_ranks(Answer(answer.name, Driver(answer.function, setting)), cases, only)
