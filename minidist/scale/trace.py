"""Traces, under the path that programs import; see `tracing/trace.py`."""

from minidist.scale.tracing.trace import (
    Tracer as Tracer,
)
from minidist.scale.tracing.trace import (
    trace as trace,
)
