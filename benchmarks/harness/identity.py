"""Tell machines apart: whether results are this machine's, or another's.

A name is no identity, since CPUs of different generations may all be called "AMD EPYC". So machines are
compared by what the CPU says of its family, model and stepping, and by caches, cores, memory and GPUs.
Results from before "cpu_id" was kept are of an unknown machine, and so another's.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from minidist.kernels.tried_once import cpu_fields

CPU_FIELDS = (
    ("cpu family", "model", "stepping"),  # x86
    ("CPU implementer", "CPU part", "CPU variant", "CPU revision"),  # ARM
)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two of `describe`'s descriptions are of one machine, or of two that are equal."""
    return _identity(one) == _identity(other)


def digest(machine: dict[str, Any]) -> str:
    """Return six letters and digits that tell machines of the same name apart."""
    text = json.dumps(_identity(machine), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def _identity(machine: dict[str, Any]) -> dict[str, Any]:
    memory = machine["memory_bytes"]
    return {
        **{key: machine.get(key) for key in ("cpu", "cpu_id", "cores", "caches")},
        "memory": memory and round(memory / 2**30),  # a kernel keeps some MB more or fewer for itself
        "gpus": [(gpu["name"], gpu.get("memory_bytes")) for gpu in machine["gpus"] or []],
    }


def cpu_id(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return the CPU's family, model and stepping, as `25-17-1`, or ARM's numbers; "" if unknown."""
    fields = cpu_fields(cpuinfo)
    for each in CPU_FIELDS:
        if fields.keys() >= set(each):
            return "-".join(fields[key] for key in each)
    return ""
