"""Context parallelism of transformers' models: ring attention by the name in their config, and positions.

An attention module of transformers looks up its function by `config._attn_implementation`. So ring attention
is registered under a name of our own, and the model gets copies of its configs with that name: models that
use the same config object keep theirs. The model's `forward` gets the `position_ids` of the rank's tokens.

Attention with cp is causal or sees all tokens. A model or a batch that needs another mask is refused.

Source: transformers, "Attention Interface" (docs/source/en/attention_interface.md).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.sequence_share.sequence_share import SequenceShare

NAME = "minidist_ring_attention"
"""The name under which transformers finds `_attend` and `_mask`."""
_REMEDY = "with cp attention is causal or sees all tokens, and nothing else: use dp instead of cp"


def apply(model: nn.Module, share: SequenceShare) -> bool:
    """Make the models of transformers in `model` work on this rank's tokens; returns whether there are any.

    Raises ValueError if one computes its positions itself, has layers that pass a state from token to token,
    or has attention of its own.
    """
    found = [*_outermost(model)]
    if found:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _mask)
    for each in found:
        names = [*inspect.signature(each.forward).parameters]
        _check(each, names)
        copies: dict[int, Any] = {}
        for part in each.modules():
            part.token_share = share  # for `_attend`
            if hasattr(getattr(part, "config", None), "_attn_implementation"):
                part.config = copy.deepcopy(part.config, copies)
        each.set_attn_implementation(NAME)
        if each.config._attn_implementation != NAME:
            raise ValueError(
                f"a {type(each).__name__} does not use the attention functions of transformers, so cp cannot "
                "replace its attention; use dp instead"
            )
        each.forward = wraps(each.forward)(partial(_forward, share, names, each.forward))
    return bool(found)


def _outermost(module: nn.Module) -> Iterator[Any]:
    """The models of transformers that are not part of another one."""
    if hasattr(module, "set_attn_implementation"):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _check(model: Any, names: Sequence[str]) -> None:
    if "position_ids" not in names:
        why = "its forward has no argument `position_ids`"
    elif any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules()):
        why = "it counts positions from the tokens that are not padding, of which a rank has only some"
    elif any(getattr(part, "_is_stateful", False) for part in model.modules()):
        why = "it has layers that pass a state from one token to the next"
    else:
        return
    raise ValueError(
        f"a {type(model).__name__} cannot work on some of a row's tokens: {why}; use dp instead of cp"
    )


def _forward(
    share: SequenceShare, names: Sequence[str], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The model's `forward` with the positions of this rank's tokens, and without a cache of its keys."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = given.get("input_ids")
    positions = share.positions_of(given["inputs_embeds"] if tokens is None else tokens)[None]  # (1, T)
    own = given.get("position_ids")
    if own is not None and not torch.equal(own, positions.expand_as(own)):
        raise ValueError(
            f"position_ids are not those of one text in each row, 0 to {(share.length or 0) - 1}, and with "
            "cp attention cannot keep several texts in a row apart; leave position_ids out, or use dp instead"
        )
    if "use_cache" in names:
        given["use_cache"] = False
    return forward(**{**given, "position_ids": positions})


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Ring attention as transformers calls it: (B, H, T, D) -> (B, T, H, D), and no weights."""
    share: Any = module.token_share
    if attention_mask is not None:
        raise ValueError(f"attention has a mask {tuple(attention_mask.shape)}; {_REMEDY}")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {name} in its attention; {_REMEDY}")
    if dropout > 0:
        raise ValueError(f"dropout is {dropout} in attention, which cannot drop weights with cp; set it to 0")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mixed = share.attend(query, key, value, causal, scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _mask(
    *_: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **__: Any,
) -> None:
    """Make no mask, since `_attend` knows from the module whether it is causal; refuse any other mask.

    attention_mask: (B, T), False for padding. local_size: of a sliding window or a chunk. use_vmap: whether
    the model adds a mask of its own.
    """
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(f"attention_mask hides {int((~attention_mask).sum())} tokens of padding; {_REMEDY}")
    if local_size is not None:
        raise ValueError(f"the model's attention sees a window of {local_size} tokens; {_REMEDY}")
    if use_vmap:
        raise ValueError(f"the model adds a mask of its own to its attention; {_REMEDY}")
