"""The prediction of a step's time at its public import path; see `time/step_time.py`."""

from minidist.scale.time.step_time import StepTime, predict_step

__all__ = ["StepTime", "predict_step"]
