"""Tests of the lessons, whose checks are imported from lessons/, as a notebook there imports them."""

import sys
from pathlib import Path

LESSONS = Path(__file__).parents[2] / "lessons"
sys.path.insert(0, str(LESSONS))
