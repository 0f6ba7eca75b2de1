"""Links between ranks, and the figures of known networks, to predict machines that are not at hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The cost of messages between ranks."""

    alpha: float  # seconds of a message of any size
    beta: float  # further seconds for each byte
    # The same if every rank sends at once. None: every rank has its own link, so nothing changes.
    busy_alpha: float | None = None
    busy_beta: float | None = None
    call: float = 0.0  # seconds of a collective apart from its messages


@dataclass(frozen=True)
class SharedMemoryCost:
    """The cost of collectives in shared memory, with all ranks of a host at work."""

    meet: float  # seconds of a barrier
    put: float  # seconds to copy in a byte
    take: float  # seconds to copy out a byte that another rank put there
    combine: float  # seconds to combine a byte of another rank with this rank's
    call: float = 0.0  # seconds of a collective apart from these


@dataclass(frozen=True)
class LinkProfile:
    """How fast messages and shared memory between some ranks are."""

    name: str
    source: str  # where the figures come from
    links: dict[str, Link]  # "messages" for our algorithms, "torch" if torch's own differ
    gamma: float  # seconds to combine a byte with one that came in a message
    memory: SharedMemoryCost | None = None  # None if the ranks share no memory
    ranks: int | None = None  # how many ranks were measured


def _network(name: str, alpha: float, bytes_per_second: float, gamma: float, source: str) -> LinkProfile:
    return LinkProfile(name, source, {"messages": Link(alpha, 1 / bytes_per_second)}, gamma)


_TCP = 30e-6
"""Seconds of a small message: the kernel's TCP on both sides, and a switch. 20 to 50 us are common."""
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
"""Known networks by name."""
