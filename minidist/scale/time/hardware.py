"""Machines by name, for predictions: the figures of their data sheets, and the rates that training attains.

>>> hardware("h100").memory
80000000000
>>> this_machine()  # measured here, in seconds

machines.json has the figures, what each means, and their sources. `attained`, the share of the peak that
large products reach, is set so that a whole step agrees with a published training on that device;
`tests/scale/time/test_step_time.py` checks that. minidist does not run on TPUs and Trainium; a plan for one
is for the library that the machine `needs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minidist._names import unknown
from minidist.comm.cost.links import PROFILES, Link, LinkProfile
from minidist.scale.time.measure_machine import this_machine as this_machine
from minidist.scale.time.rates import Hardware as Hardware
from minidist.scale.time.rates import Rates


def _machine(name: str, sheet: dict[str, Any]) -> Hardware:
    """A machine from its entry in machines.json, with the defaults filled in."""
    bandwidth, call, domain = sheet["bandwidth"], sheet["call"], sheet["domain"]
    attained = {
        precision: sheet.get(f"attained_in_{precision}", sheet["attained"]) for precision in sheet["peak"]
    }

    def links(figures: Any, where: str, hop: float) -> LinkProfile:
        if isinstance(figures, str):
            return PROFILES[figures]
        messages = Link(hop, 1 / figures["bytes_per_second"])
        add = 3 / bandwidth  # a sum reads two operands and writes one
        return LinkProfile(figures.get("name", where), figures["source"], {"messages": messages}, add)

    rates = Rates(
        {precision: attained[precision] * peak for precision, peak in sheet["peak"].items()},
        sheet["attention"],
        moved=sheet["moved"] * bandwidth,
        memory=sheet["moved"] * bandwidth,
        call=call,
        backward_call=sheet.get("backward_call", call),
        tensor=sheet["tensor"],
        asynchronous=sheet["asynchronous"],
    )
    return Hardware(
        name,
        sheet["source"],
        sheet["peak"],
        sheet["attained"],
        sheet["attained_source"],
        int(sheet["memory"]),
        bandwidth,
        sheet["ranks_per_host"],
        links(sheet["inside"], f"inside a {domain} of {name}", sheet["hop"]),
        links(sheet["between"], f"between {domain}s of {name}", sheet["network_hop"]),
        rates=rates,
        domain=domain,
        needs=sheet["needs"],
    )


def _read() -> dict[str, Hardware]:
    read = json.loads(Path(__file__).with_name("machines.json").read_text(encoding="utf-8"))
    return {name: _machine(name, {**read["defaults"], **sheet}) for name, sheet in read["machines"].items()}


HARDWARE = _read()
"""Machines by name."""


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
