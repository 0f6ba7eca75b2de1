"""The time of a step, under the path that lessons and programs import; see `time/step_time.py`."""

from minidist.scale.time.step_time import (
    StepTime as StepTime,
)
from minidist.scale.time.step_time import (
    predict_step as predict_step,
)
