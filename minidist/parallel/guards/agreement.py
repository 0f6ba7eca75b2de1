"""Were all ranks called alike? Where arguments differ, ranks would wait for messages that nobody sends.

A hash of the arguments is compared where an object is made; only where hashes differ are the arguments
themselves exchanged, so that the error can say which rank was given what.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

import torch

from minidist import comm
from minidist.comm.work import Group, ranks_of


def require_alike(what: str, values: Mapping[str, object], group: Group) -> None:
    """ValueError, on every rank, where the ranks' values differ; names a rank and its value.

    Each rank sends 16 (n - 1) bytes.

    Args:
        what: whose arguments they are, for the message.
        values: by argument; what they print as is compared. The same arguments on all ranks.
        group: of the ranks, which all call it; None for all.
    """
    ranks = ranks_of(group)
    if len(ranks) == 1:
        return
    text = json.dumps({name: str(value) for name, value in values.items()}).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    own = torch.tensor([digest, len(text)], device=comm.device())
    everyones = comm.all_gather(own, group=group).view(-1, 2)
    if bool((everyones == everyones[0]).all()):
        return
    longest = int(everyones[:, 1].max())
    padded = torch.tensor([*text.ljust(longest)], dtype=torch.uint8, device=own.device)
    rows = comm.all_gather(padded, group=group).view(-1, longest).tolist()
    found = [json.loads(bytes(row)) for row in rows]
    name = next(name for name in found[0] if len({each[name] for each in found}) > 1)
    told = [each[name] for each in found]
    most = told.index(Counter(told).most_common(1)[0][0])
    other = next(place for place, value in enumerate(told) if value != told[most])
    raise ValueError(
        f"{what} got {name} {told[other]} on rank {ranks[other]} and {told[most]} on rank {ranks[most]}; "
        "give all ranks the same"
    )
