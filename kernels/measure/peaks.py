"""The bounds of a kernel on one machine, as data: its rates of arithmetic, and its memory's bandwidth.

A kernel that does I operations for each byte that it moves can't go faster than I times the bandwidth, nor
faster than the arithmetic itself: its rate is at most the smaller of the two. Drawn against I, the bound
looks like a roof; its ridge is the I at which memory stops being the limit (`roofline.py` names the source).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike


def dtype_name(dtype: DTypeLike | str) -> str:
    """Return "float32" for numpy.float32, "f4" and "float32" alike; other names ("tf32") unchanged."""
    try:
        name: str = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    return name


@dataclass(frozen=True)
class Roof:
    """The roofline of one core, of all cores together, or of a GPU."""

    name: str  # "one core", "2 cores", or the name of the GPU
    flops: Mapping[str, float]  # FLOP/s by dtype
    bandwidth: float  # byte/s, main memory (on a GPU, the device's)
    granted: float = 1.0  # share of the time in which the measuring threads ran; the rest went to others

    def __post_init__(self) -> None:
        for what, rate in {**self.flops, "bandwidth": self.bandwidth}.items():
            if not (isinstance(rate, float) and 0 < rate < math.inf):
                raise ValueError(
                    f"the peak {what} of {self.name} is {rate!r}: pass a positive finite number a second"
                )
        if not (isinstance(self.granted, float) and 0 <= self.granted <= 1):
            raise ValueError(f"granted is {self.granted!r}: pass a share of time, from 0.0 to 1.0")

    def peak(self, dtype: DTypeLike | str = "float32") -> float:
        """Return the FLOP/s of arithmetic in `dtype`; raise ValueError if that was not measured."""
        name = dtype_name(dtype)
        if name not in self.flops:
            raise ValueError(
                f"dtype is {name!r}, and the peaks of {self.name} were measured in {', '.join(self.flops)}: "
                "ask for one of these"
            )
        return self.flops[name]

    def ridge(self, dtype: DTypeLike | str = "float32") -> float:
        """Return the intensity in FLOP/byte at which arithmetic, not memory, becomes the limit."""
        return self.peak(dtype) / self.bandwidth

    def attainable(self, intensity: ArrayLike, dtype: DTypeLike | str = "float32") -> Any:
        """Return min(peak, intensity * bandwidth) in FLOP/s, for one intensity in FLOP/byte or an array.

        Raises ValueError for an intensity that is negative or NaN.
        """
        x = np.asarray(intensity, np.float64)
        if not np.all(x >= 0):  # NaN too
            raise ValueError(f"intensity is {intensity!r}: pass operations per byte, 0 or more")
        bound = np.minimum(self.peak(dtype), x * self.bandwidth)
        return float(bound) if bound.ndim == 0 else bound


@dataclass(frozen=True)
class Peaks:
    """The roofs of one machine, as measured on one day."""

    machine: str  # the CPU's name
    vector_unit: str  # "AVX-512": what the FMA loop was compiled for
    cores: int  # CPUs that the process might run on; hardware threads count
    date: str  # of the measurement, as in 2026-01-31
    one: Roof  # one core, while the others rest
    all: Roof  # all cores at once
    gpu: Roof | None = None  # None where torch finds no GPU

    def __post_init__(self) -> None:
        if not (isinstance(self.cores, int) and self.cores >= 1):
            raise ValueError(f"cores is {self.cores!r}: pass their number, 1 or more")

    @property
    def roofs(self) -> tuple[Roof, ...]:
        """Return the roofs: one core, all cores if there are several, the GPU if there is one."""
        several = (self.all,) if self.cores > 1 else ()
        return (self.one, *several, *((self.gpu,) if self.gpu else ()))

    def roof(self, cores: str) -> Roof:
        """Return the roof of "one" core, of "all", or of the "gpu"; raise ValueError if there is none."""
        found = {"one": self.one, "all": self.all, "gpu": self.gpu}.get(cores)
        if found is None:
            there = ["one", "all", *(["gpu"] if self.gpu else [])]
            raise ValueError(f"cores is {cores!r}: on this machine, pass {' or '.join(map(repr, there))}")
        return found

    @property
    def busy(self) -> bool:
        """Whether other programs ran during the measurement, so that the peaks are too low."""
        return any(roof.granted < 0.9 for roof in self.roofs)

    def __str__(self) -> str:
        lines = [f"{self.machine}, {self.cores} cores, {self.vector_unit}, measured {self.date}"]
        for roof in self.roofs:
            rates = ", ".join(f"{rate / 1e9:.4g} GFLOP/s {dtype}" for dtype, rate in roof.flops.items())
            lines.append(f"{roof.name}: {rates}, {roof.bandwidth / 1e9:.4g} GB/s")
        if self.busy:
            lines.append("Other programs ran meanwhile, so these are too low: measure(fresh=True) when idle.")
        return "\n".join(lines)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Peaks:
        """Return the Peaks of fields from `dataclasses.asdict`; TypeError or ValueError for others."""
        roofs = {name: Roof(**fields[name]) for name in ("one", "all")}
        gpu = None if fields["gpu"] is None else Roof(**fields["gpu"])
        return cls(**{**fields, **roofs, "gpu": gpu})
