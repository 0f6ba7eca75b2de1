"""The planner, under the path that programs import; see `planning/planner.py`."""

from minidist.scale.planning.planner import (
    Plan as Plan,
)
from minidist.scale.planning.planner import (
    plan as plan,
)
