"""Which exercises have passed, and which at par: one small file beside the lessons, lessons/.progress.json.

Deleting it begins anew. MINIDIST_LESSONS_PROGRESS names another file.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / ".progress.json"


def file() -> Path:
    """Where it is kept."""
    return Path(os.environ.get("MINIDIST_LESSONS_PROGRESS") or FILE)


def read(which: str = "passed") -> dict[str, dict[str, Any]]:
    """By topic, by exercise, the day: of those that have "passed", or of those among them "at_par".

    Or a game's "points".

    A damaged file is set aside, with a sentence. A file from before par was kept has nothing at par.
    """
    path = file()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = kept["passed"] if which == "passed" else kept.get(which, {})
        if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
            raise ValueError
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        aside = path.with_name(path.name + ".damaged")
        try:
            path.replace(aside)
            print(f"{path.name} could not be read, is now {aside.name}, and progress begins anew.")
        except OSError:
            print(f"{path} cannot be read; progress is not shown.")
        return {}


def note(topic: str, exercise: str, at_par: bool = False, points: int | None = None) -> None:
    """Keep that an exercise has passed. Where the file cannot be written, that costs a sentence.

    Once at par, always at par: a later answer that costs more does not take it back. Points are those of the
    first time.
    """
    path = file()
    passed, best, game = read(), read("at_par"), read("points")
    today = time.strftime("%Y-%m-%d")
    passed.setdefault(topic, {})[exercise] = today
    if at_par:
        best.setdefault(topic, {})[exercise] = today
    if points is not None:
        game.setdefault(topic, {}).setdefault(exercise, points)
    kept = {"version": 1, "passed": passed, "at_par": best} | ({"points": game} if game else {})
    text = json.dumps(kept, indent=1, sort_keys=True) + "\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
        ) as new:
            new.write(text)
        os.replace(new.name, path)  # the whole file or none of it
    except OSError as error:
        print(f"Progress is not kept: {error.strerror} ({path}).")
