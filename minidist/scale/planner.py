"""The planner at its public import path; see `planning/planner.py`."""

from minidist.scale.planning.planner import Plan, plan

__all__ = ["Plan", "plan"]
