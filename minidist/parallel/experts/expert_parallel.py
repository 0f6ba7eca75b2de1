"""Tokens travel to the ranks of their experts, and the results back: two all-to-alls forward, two backward.

Every rank routes its own tokens with a whole router. It sorts the pairs (token, expert) by expert, tells each
rank how many pairs come for each of its experts, and sends them. The rank that holds the experts computes as
one process would, and sends the results back, where the gates weight them.

    rank 0: route, sort ──╲  ╱── experts 0 and 1 ──╲  ╱── gates, sum
                           ╳     all-to-all         ╳
    rank 1: route, sort ──╱  ╲── experts 2 and 3 ──╱  ╲── gates, sum

No token is dropped, so a rank may receive any number, also none.

Sources: Lepikhin et al. 2020, "GShard", section 3; Gale et al. 2023, "MegaBlocks" (dropless).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.differentiable import exchange_rows
from minidist.comm.opaque import opaque
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.contract.training_state import parameter_like

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The experts' forward: tokens (N, D), numbers of experts (N, k), gates (N, k) -> (N, D)."""


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold several experts, by name: ours, and those of transformers (Mixtral, Qwen-MoE).

    Such a module has `num_experts`, parameters with a row for each expert and nothing else, and a forward of
    tokens (N, D), the experts' numbers (N, k) and their gates (N, k).
    """
    found = {}
    for name, module in model.named_modules():
        count, own = getattr(module, "num_experts", None), [*module._parameters.values()]
        rows = [each is not None and each.dim() > 1 and len(each) == count for each in own]
        alone = rows and all(rows) and not module._modules.keys() - {"act_fn"}
        if alone and len(inspect.signature(module.forward).parameters) == 3:
            found[name] = module
    return found


def share_experts(model: nn.Module, group: Group = None) -> dict[str, tuple[torch.Size, int]]:
    """Keep this rank's experts of each layer, in place. Sends nothing.

    Rank r of n keeps experts r E / n to (r + 1) E / n. Every rank passes the same whole model, with the same
    weights. Returns by name the shape that each parameter of the experts had, and the first expert of this
    rank. After backward their gradients are complete for the tokens of this group, and the ranks with the
    same experts sum them as a `ParameterSet` of their own (engine/prepare.py makes it); all others' are of
    this rank's tokens.

    Raises:
        ValueError: the model has no layer with several experts, or n does not divide their number.
    """
    ranks, own, found = len(ranks_of(group)), rank_in(group), experts_of(model)
    if not found:
        raise ValueError(
            "the model has no layer with several experts, which expert parallelism would share; give ep=1, "
            "or a model such as GPT(GPTConfig(..., experts=8)) or Mixtral"
        )
    for name, module in found.items():
        if module.num_experts % ranks:  # type: ignore[operator]
            raise ValueError(
                f"{name} has {module.num_experts} experts, which ep={ranks} does not divide; give a divisor"
            )
    kept: dict[str, tuple[torch.Size, int]] = {}
    parts: dict[Tensor, nn.Parameter] = {}  # tied ones stay tied
    for prefix, module in found.items():
        layer: Any = module
        E, k = layer.num_experts, layer.num_experts // ranks
        for name, whole in module.named_parameters(recurse=False):
            part = parameter_like(whole, whole.detach()[own * k : (own + 1) * k].clone())
            module._parameters[name] = parts.setdefault(whole, part)
            kept[f"{prefix}.{name}"] = whole.shape, own * k
        layer.num_experts = k
        layer.forward = partial(_forward, partial(_compute, layer, layer.forward), E, group)
    return kept


def _compute(layer: nn.Module, forward: Compute, guests: Tensor, own: Tensor, gates: Tensor) -> Tensor:
    """The results of this rank's experts for its guests; without any, still of all parameters and the guests.

    So backward takes part in the all-to-all, and the experts have gradients, of zero, as in one process.
    """
    results = forward(guests, own, gates)
    if len(guests):
        return results
    return sum((p.flatten()[:0].sum() for p in layer.parameters(recurse=False)), results + guests)


@opaque
def _forward(compute: Compute, E: int, group: Group, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    """Send tokens (N, D) to their experts, and return the sum of their results, weighted by the gates.

    Sends 2 O + 2 G rows of D elements forward and backward together: O pairs of this rank that go to others,
    G guests from others; and 8 (E - E / n) bytes that say how many pairs come.
    """
    ranks = len(ranks_of(group))
    k = E // ranks
    flat = chosen.flatten()  # (N k)
    going = flat.bincount(minlength=E)[:E]  # pairs for each expert; numbers from E on stand for none
    coming = comm.all_to_all(going, group=group).view(ranks, k)
    outgoing, incoming = going.view(ranks, k).sum(1).tolist(), coming.sum(1).tolist()
    order = flat.argsort(stable=True)[: sum(outgoing)]  # the pairs of expert 0 first
    token = order // chosen.shape[1]
    guests = exchange_rows(tokens[token], outgoing, incoming, group)
    # From rank 0 for expert 0, 1, ..., then from rank 1: which of our experts each guest chose.
    own = torch.arange(k, device=flat.device).repeat(ranks).repeat_interleave(coming.flatten())
    results = compute(guests, own[:, None], torch.ones_like(guests[:, :1]))
    back = exchange_rows(results, incoming, outgoing, group)
    weighted = back * gates.flatten()[order, None]
    return torch.zeros_like(tokens).index_add(0, token, weighted.to(tokens.dtype))
