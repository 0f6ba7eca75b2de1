"""Links and their figures, for predictions about machines that are not at hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Messages between ranks."""

    alpha: float  # seconds of a message, whatever its size
    beta: float  # seconds more for each of its bytes
    # The same where every rank sends at once; None: each rank has a link of its own, so nothing changes.
    busy_alpha: float | None = None
    busy_beta: float | None = None
    call: float = 0.0  # seconds of a collective beside its messages


@dataclass(frozen=True)
class SharedMemoryCost:
    """What ranks of one host do in memory that they share, all at once."""

    meet: float  # seconds of a meeting
    put: float  # seconds per byte that is copied in
    take: float  # seconds per byte that another rank put there, and that is copied out
    combine: float  # seconds per byte that another rank put there, and that is combined with this rank's
    call: float = 0.0  # seconds of a collective beside these


@dataclass(frozen=True)
class LinkProfile:
    """How fast ranks talk."""

    name: str
    source: str  # where the figures come from
    links: dict[str, Link]  # "messages" for our algorithms, and "torch" where torch's own differ
    gamma: float  # seconds per byte that is combined with one that came in a message
    memory: SharedMemoryCost | None = None  # None where the ranks have no memory in common
    ranks: int | None = None  # how many there were when it was measured


def _network(name: str, alpha: float, bytes_per_second: float, gamma: float, source: str) -> LinkProfile:
    return LinkProfile(name, source, {"messages": Link(alpha, 1 / bytes_per_second)}, gamma)


_TCP = 30e-6
"""Seconds of a small message through the kernel's TCP on both sides and a switch; 20 to 50 us are common."""
_CPU_SUM = 3 / 30e9
"""Seconds per byte of a sum on one core of a server: two reads and a write in memory at 30 GB/s."""
_GPU_SUM = 3 / 3.35e12
"""The same on an H100, whose memory moves 3.35 TB/s (NVIDIA H100 datasheet)."""

PROFILES = {
    profile.name: profile
    for profile in (
        _network("25gbe", _TCP, 25e9 / 8, _CPU_SUM, "line rate of IEEE 802.3by; latency of the kernel's TCP"),
        _network(
            "100gbe", _TCP, 100e9 / 8, _CPU_SUM, "line rate of IEEE 802.3bj; latency of the kernel's TCP"
        ),
        _network(
            "infiniband_ndr",
            14e-6,
            400e9 / 8,
            _GPU_SUM,
            "NVIDIA ConnectX-7 datasheet: 400 Gbit/s; alpha: a hop between nodes in NCCL's model of cost "
            "(src/graph/tuning.cc, ring, Simple protocol)",
        ),
        _network(
            "nvlink4",
            3.4e-6,
            450e9,
            _GPU_SUM,
            "NVIDIA H100 datasheet: 900 GB/s, both directions together; alpha: a hop over NVLink in NCCL's "
            "model of cost (src/graph/tuning.cc, ring, Simple protocol)",
        ),
    )
}
"""Networks by name."""
