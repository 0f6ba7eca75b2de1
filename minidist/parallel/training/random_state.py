"""Random numbers of tensor-parallel ranks: the same where they compute the same, others where they do not.

What all ranks compute they have to drop alike, or their copies part. What each has a part of, its heads or
its share of the sequence, is to be dropped independently. So ranks start with the same state; in a part of
their own, they draw one number from it, alike, which with the rank seeds a stream that lasts for that part.
The common state moves on by one draw on every rank, however much each rank drew. And since the stream follows
from the common state, recomputation that restores the one restores the other.

Source of the two streams: Shoeybi et al. 2019, "Megatron-LM", appendix B.2 (there a second generator that is
kept, and that recomputation has to restore as well).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minidist import comm
from minidist.comm.work import Group, rank_in
from minidist.model.seeding import stable_hash


def share_random_state(group: Group = None) -> None:
    """Give all ranks of a group the state of torch's generators on its first rank.

    Sends some 5,000 bytes to each child in `comm.broadcast`'s tree.
    """
    state = torch.get_rng_state()
    torch.set_rng_state(comm.broadcast(state, group=group))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        on_gpu = torch.cuda.get_rng_state().to(comm.device())
        torch.cuda.set_rng_state(comm.broadcast(on_gpu, group=group).cpu())


@contextmanager
def own_random_state(group: Group = None) -> Iterator[None]:
    """Inside, torch's random numbers differ from rank to rank of a group whose ranks have the same state.

    Afterwards the state is as if one number had been drawn, on every rank. Sends nothing.
    """
    with random_state_of(rank_in(group)):
        yield


@contextmanager
def random_state_of(place: int) -> Iterator[None]:
    """Inside, torch's random numbers follow from the state and a place; afterwards one has been drawn.

    The engine gives each pipeline stage and each share of the batch and of the sequence a place of its own:
    ranks start alike unless a program seeds them otherwise, and would drop the same units everywhere.
    """
    seed = stable_hash(int(torch.randint(2**62, ())), place)
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield
