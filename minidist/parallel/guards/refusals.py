"""Refuse what would train wrongly, or fail in the middle of a step, before anything changes.

`require_alike` compares the arguments of all ranks: ranks that were called differently would wait for
messages that nobody sends.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, ranks_of


def require_alike(what: str, values: Mapping[str, object], group: Group) -> None:
    """Raise ValueError on every rank if the ranks' values differ; the error names two ranks and their values.

    Ranks compare a hash: each sends 16 (n - 1) bytes. Only if the hashes differ do they exchange the values.

    what: the function or class whose arguments these are, for the message. values: argument -> value,
    compared by its text; all ranks name the same arguments. group: the ranks, all of which call this; None
    for all.
    """
    ranks = ranks_of(group)
    if len(ranks) == 1:
        return
    text = json.dumps({name: str(value) for name, value in values.items()}).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    own = torch.tensor([digest, len(text)], device=comm.device())
    gathered = comm.all_gather(own, group=group).view(-1, 2)
    if bool((gathered == gathered[0]).all()):
        return
    longest = int(gathered[:, 1].max())
    padded = torch.tensor([*text.ljust(longest)], dtype=torch.uint8, device=own.device)
    rows = comm.all_gather(padded, group=group).view(-1, longest).tolist()
    found = [json.loads(bytes(row)) for row in rows]
    name = next(name for name in found[0] if len({each[name] for each in found}) > 1)
    texts = [each[name] for each in found]
    most = texts.index(Counter(texts).most_common(1)[0][0])
    other = next(index for index, value in enumerate(texts) if value != texts[most])
    raise ValueError(
        f"{what} got {name} {texts[other]} on rank {ranks[other]} and {texts[most]} on rank {ranks[most]}; "
        "give all ranks the same"
    )


def refuse_renormed(model: nn.Module) -> None:
    """Raise ValueError if an embedding has max_norm.

    Its forward pass shortens the rows that it reads, in place. Each rank reads other rows, so the ranks'
    tables would differ; and where the rows are gathered or rounded copies, the change would be lost.
    """
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"{name or 'the model'} is an {type(part).__name__} with max_norm={part.max_norm}, which "
                "shortens other rows on each rank; leave max_norm out, and shorten all rows alike after each "
                "step, such as with torch.renorm, or train on one rank"
            )


def refuse_meta(what: str, named: Any) -> None:
    """Raise ValueError if a parameter or buffer is on the meta device, where it has no values."""
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(
                f"{what} has {name} on the meta device, without values; build it on a real device, or train "
                "with FullyShard, which builds it unit by unit, or in a layout with zero=3, tp or pp"
            )


def require_trained(what: str, parameters: Any) -> None:
    """Raise ValueError if no parameter gets gradients."""
    found = [*parameters]
    if not any(parameter.requires_grad for parameter in found):
        have = "all of its parameters are frozen" if found else "it has no parameters"
        raise ValueError(f"{what} has nothing to train, since {have}; give one with requires_grad")


def require_model(model: object, optimizer: object, name: str = "optimizer") -> None:
    """Raise TypeError if a model is not a module, or `optimizer` is not a function that makes one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"{name} is a {type(optimizer).__name__}; give a function from parameters to an optimizer, "
            "such as functools.partial(torch.optim.AdamW, lr=3e-4)"
        )


def require_optimizer(made: object, name: str = "optimizer") -> None:
    """Raise TypeError if a function that should make an optimizer made something else."""
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"{name} made a {type(made).__name__}; give a function from parameters to a "
            "torch.optim.Optimizer, such as functools.partial(torch.optim.AdamW, lr=3e-4)"
        )


def refuse_added(named: Iterable[tuple[str, Tensor]], known: Collection[int]) -> None:
    """Raise ValueError where a DataParallel's module has got a parameter whose id is not known."""
    for name, parameter in named:
        if id(parameter) not in known:
            raise ValueError(
                f"the parameter {name} was added after the DataParallel was made, which would not "
                "synchronize it; del it, and make a new DataParallel of the module"
            )


def refuse_copy(*_: object) -> None:
    """Raise TypeError: an engine's groups of ranks, hooks and shared memory cannot be copied."""
    raise TypeError(
        "an engine cannot be copied, since its ranks talk to each other through it; prepare another one, and "
        "give its model these weights, engine.full_state_dict(), or load a checkpoint into it"
    )


def refuse_growth(_: object) -> None:
    """Raise RuntimeError: stands for `add_param_group` of an engine's optimizer."""
    raise RuntimeError(
        "an engine's optimizer takes no further parameters, since its ranks would not share them; build the "
        "grown model anew, call load_state_dict(engine.full_state_dict(), strict=False) on it, and prepare "
        "another engine of it"
    )


def refuse_state_of_slices(*_: object) -> None:
    """Raise RuntimeError: a hook on `state_dict` and `load_state_dict` of an optimizer of a rank's slices."""
    raise RuntimeError(
        "an engine's optimizer has only this rank's share of the state, in slices; save the whole with "
        "md.save(engine, path), and load it with md.load(engine, path)"
    )


def gradients_are_off() -> RuntimeError:
    """The error of a step where `torch.is_grad_enabled()` is False."""
    return RuntimeError(
        "gradients are off here, as in torch.no_grad() or torch.inference_mode(), and a step trains; call it "
        "outside, or evaluate"
    )


def require_metric(metric: object) -> None:
    """Raise TypeError if `metric` is neither a function nor None, which stands for the loss."""
    if metric is not None and not callable(metric):
        raise TypeError(
            f"metric is {metric!r}; give a function from outputs and targets to the mean over their rows, or "
            "None for the loss"
        )
