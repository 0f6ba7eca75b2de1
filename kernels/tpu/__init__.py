"""A TPU's matrix unit in parts: what every array has, its two dataflows, and what to count.

`minidist.kernels.tpu.systolic` is the door to it.
"""
