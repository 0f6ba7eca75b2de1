"""Random numbers of tensor-parallel ranks: the same where ranks compute the same, different elsewhere.

Ranks that all compute one thing must drop the same units, or their copies diverge. In a part of its own, its
heads or its share of the sequence, each rank must drop independently. So ranks start with the same state. On
entering a part of its own, every rank draws the same number from that common state, and seeds a temporary
stream with it and its rank. The common state thus advances by one draw on every rank, however much each rank
draws inside; and recomputation that restores the common state also restores the stream.

Source of the two streams: Shoeybi et al. 2019, "Megatron-LM", appendix B.2 (which keeps a second generator
that recomputation has to restore as well).
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch

from minidist import comm
from minidist.comm.work import Group, rank_in
from minidist.model.seeding import random_state_of


def random_states() -> dict[str, Any]:
    """The states of torch's generators, a GPU's, numpy's and Python's."""
    found = {"torch": torch.get_rng_state(), "python": random.getstate()}
    found["numpy"] = numpy.random.get_state(legacy=False)  # noqa: NPY002 - what `numpy.random.rand` draws from
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_states(states: dict[str, Any]) -> None:
    """Set what `random_states` returned."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def share_random_state(group: Group = None) -> None:
    """Give all ranks of a group the state of torch's generators on its first rank, some 5,000 bytes."""
    state = torch.get_rng_state()
    torch.set_rng_state(comm.broadcast(state, group=group))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        on_gpu = torch.cuda.get_rng_state().to(comm.device())
        torch.cuda.set_rng_state(comm.broadcast(on_gpu, group=group).cpu())


def own_random_state(group: Group = None) -> AbstractContextManager[None]:
    """Inside, ranks of a group that start with the same state draw different numbers. Sends nothing."""
    return random_state_of(rank_in(group))
