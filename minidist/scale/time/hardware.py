"""Machines by name, for predictions.

>>> hardware("h100").memory
80000000000
>>> this_machine()  # measured here, in seconds

Their figures and sources are in data_sheets.py.
"""

from __future__ import annotations

from minidist._names import unknown
from minidist.scale.time.data_sheets import HARDWARE as HARDWARE
from minidist.scale.time.measure_machine import this_machine as this_machine
from minidist.scale.time.rates import Hardware as Hardware


def hardware(name: str | Hardware) -> Hardware:
    """The machine of that name, or the `Hardware` given. A ValueError suggests the nearest known name."""
    if isinstance(name, Hardware):
        return name
    if name not in HARDWARE:
        raise unknown("hardware profile", name, HARDWARE)
    return HARDWARE[name]


def smallest(memory: int) -> Hardware:
    """The GPU with the least memory that has `memory` bytes; the largest GPU if none has."""
    gpus = [each for each in HARDWARE.values() if each.rates and each.rates.asynchronous and not each.needs]
    enough = [each for each in gpus if each.memory >= memory]
    if not enough:
        return max(gpus, key=lambda each: (each.memory, each.peak["fp16"]))
    return min(enough, key=lambda each: (each.memory, -each.peak["fp16"]))
