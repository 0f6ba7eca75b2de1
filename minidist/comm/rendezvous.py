"""Open the store through which the ranks of a world find each other, at MASTER_ADDR and MASTER_PORT.

Usually rank 0 serves it. torchrun's agent serves one itself, for all lives of its ranks: when a rank dies, it
restarts all of them and keeps the store, with the addresses of the dead. So the ranks of each life first
agree on a fresh part of that store (`fresh_part`). The number of restarts can't name this part, since agents
on different machines count differently: only the agent whose rank has died counts the restart.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PAUSE = 0.005
"""Seconds between rank 0's looks at who has come."""


def open_store(host: str, port: int, own: int, ranks: int, timeout: float) -> Store:
    """Return the store of this world, which holds nothing yet.

    Raises:
        RuntimeError: the port is in use.
        TimeoutError: the others did not come in time.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, ranks, is_master=own == 0 and not agent, timeout=limit
        )
        part = fresh_part(store, own, ranks, timeout) if agent else "minidist"
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise RuntimeError(
                f"port {port} on {host} is in use by another program; set MASTER_PORT to a free one "
                "(torchrun: --master-port)"
            ) from error
        raise TimeoutError(
            f"rank {own} found no world of {ranks} at {host}:{port} within {timeout:g} s; "
            "start rank 0, and see that this is its address"
        ) from error
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"rank {own} waited {timeout:g} s at {host}:{port} for a world of {ranks}; start all the ranks"
        ) from error
    return dist.PrefixStore(part, store)  # type: ignore[attr-defined]


def fresh_part(store: Store, own: int, ranks: int, timeout: float) -> str:
    """Agree with the other ranks that live now on a name that no earlier life has used.

    Rank 0 draws the name. Every other rank writes a random question under its own rank, and rank 0 answers it
    with the name. Rank 0 may also answer a question from an earlier life. That answer is never read.
    """
    if own:
        question = secrets.token_hex(8)
        store.set(f"minidist/question/{own}", question)
        name = store.get(f"minidist/answer/{question}").decode()
        store.set(f"{name}/present/{own}", "1")  # not a count: a rank that its agent restarts asks twice
        return name
    name, deadline = f"minidist/{secrets.token_hex(8)}", time.monotonic() + timeout
    answered = dict.fromkeys(range(1, ranks), "")
    while ranks > 1 and not store.check([f"{name}/present/{other}" for other in answered]):
        for other in answered:
            key = f"minidist/question/{other}"
            question = store.get(key).decode() if store.check([key]) else ""
            if question != answered[other]:
                store.set(f"minidist/answer/{question}", name)
                answered[other] = question
        if time.monotonic() > deadline:
            raise dist.DistStoreError("not all ranks came")
        time.sleep(_PAUSE)
    return name
