"""Traces at their public import path; see `tracing/trace.py`."""

from minidist.scale.tracing.trace import Tracer, trace

__all__ = ["Tracer", "trace"]
