"""Made-up peaks in round numbers: the ridges of one core are at 5 and 2.5 FLOP/byte."""

from minidist.kernels.measure.peaks import Peaks, Roof

ONE = Roof("one core", {"float32": 100e9, "float64": 50e9}, 20e9)
ALL = Roof("4 cores", {"float32": 400e9, "float64": 200e9}, 40e9)
GPU = Roof("a GPU", {"float32": 50e12, "bfloat16": 800e12}, 4e12)
PEAKS = Peaks("a CPU", "AVX2", 4, "2026-01-31", ONE, ALL)
