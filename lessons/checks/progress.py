"""Which exercises have passed: one small file beside the lessons, lessons/.progress.json.

Deleting it begins anew. MINIDIST_LESSONS_PROGRESS names another file.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / ".progress.json"


def file() -> Path:
    """Where it is kept."""
    return Path(os.environ.get("MINIDIST_LESSONS_PROGRESS") or FILE)


def read() -> dict[str, dict[str, Any]]:
    """By topic, by exercise: what passed and when. A damaged file is set aside, with a sentence."""
    path = file()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        passed = kept["passed"]
        if not isinstance(passed, dict) or not all(isinstance(each, dict) for each in passed.values()):
            raise ValueError
        return passed
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        aside = path.with_name(path.name + ".damaged")
        try:
            path.replace(aside)
            print(f"{path.name} could not be read, is now {aside.name}, and progress begins anew.")
        except OSError:
            print(f"{path} cannot be read; progress is not shown.")
        return {}


def note(topic: str, exercise: str) -> None:
    """Keep that an exercise has passed. Where the file cannot be written, that costs a sentence."""
    path = file()
    passed = read()
    passed.setdefault(topic, {})[exercise] = time.strftime("%Y-%m-%d")
    text = json.dumps({"version": 1, "passed": passed}, indent=1, sort_keys=True) + "\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
        ) as new:
            new.write(text)
        os.replace(new.name, path)  # the whole file or none of it
    except OSError as error:
        print(f"Progress is not kept: {error.strerror} ({path}).")
