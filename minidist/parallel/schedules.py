"""The public import path of `pipeline/schedules.py`."""

from minidist.parallel.pipeline.schedules import *  # noqa: F403
from minidist.parallel.pipeline.schedules import __all__ as __all__
