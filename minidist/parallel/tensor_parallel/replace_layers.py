"""Cut a model's matrices between ranks, by a plan that names its layers.

>>> parallelize(model, {"layers.*.fc1": "column", "layers.*.fc2": "row"})

| style | for | effect |
|---|---|---|
| "column" | a Linear | cuts its outputs; each rank returns its own |
| "column_gathered" | a Linear | cuts its outputs; every rank returns all of them |
| "column_packed=3" | a Linear | cuts each of 3 (or more, or 2) equal matrices packed in one; see below |
| "row" | a Linear | cuts its inputs, as a "column" layer before it returns them |
| "row_split" | a Linear | cuts its inputs; they arrive whole and are split first |
| "vocabulary" | an Embedding | cuts its rows; every rank returns whole vectors |
| "vocabulary" | a Linear | the last layer; each rank returns its part of the logits |
| "sequence" | norms, dropout | under sequence parallelism, works on a share of the sequence |
| "split" | an Embedding | under sequence parallelism, returns a share of the sequence |
| "random" | attention | has dropout inside, on this rank's heads: draws this rank's own random numbers |
| "attention" | attention | counts this rank's heads alone; dropout as with "random" (heads.py) |
| "per_head" | norms in attention | works on this rank's heads; sums the gradients of its own parameters |

After a last layer with style "vocabulary", use `vocab_parallel_cross_entropy`, or `gather_logits` for other
losses. Name layers of one parent that read one input together, as in "layers.*.attention.query|key|value":
they then send one message instead of three. All parts without a style must draw the same random numbers on
all ranks; they start from the same state.

A Linear that computes queries, keys and values at once has three matrices below each other, and its results
are read with `chunk(3, dim=-1)`: each of them is to be cut, which is "column_packed=3". A gate and its values
in one Linear are "column_packed=2". The "row" layer after them is as always.

A part with a `head_size` (or `head_dim`) is cut between its heads; if it has fewer heads of keys and values,
between those, together with the queries that share them. Each rank then has some of the heads. A `forward`
that reads their number from what its layers return, as in `self.query(x).unflatten(-1, (-1,
self.head_size))`, needs no more; one that reads it from `self.num_heads`, say, needs the style "attention".
Under sequence parallelism x is a share of the sequence, but the layers return all of it. An
engine's rehearsal (engine/rehearsal.py) tells whether the cut model computes the same.

A Conv1D of GPT-2, whose weight is (in, out), is cut like a Linear. In a LoRA of peft's the layer itself is
cut, and with "column", "row" and a last "vocabulary" the adapter's matrix on that side. `plan_for` (plans.py)
finds the plan of many models.

Sources: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from minidist.comm.work import Group, ranks_of
from minidist.parallel.tensor_parallel.cuts import TensorParallel, send_whole
from minidist.parallel.tensor_parallel.heads import cut_between_heads, work_on_own_heads
from minidist.parallel.tensor_parallel.linear_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedInput,
)
from minidist.parallel.tensor_parallel.sequence_parallel import (
    on_own_tokens,
    split_after,
    with_own_random_numbers,
    wrap,
)
from minidist.parallel.tensor_parallel.styles import (
    StyledModule,
    check_gradients_are_summed,
    check_ties,
    resolve,
)
from minidist.parallel.tensor_parallel.vocabulary import VocabParallelEmbedding
from minidist.parallel.training.fp8 import switch_fast_paths_off
from minidist.parallel.training.random_state import share_random_state

_WRAPPERS = {
    "per_head": (on_own_tokens, True),
    "random": (with_own_random_numbers, True),
    "sequence": (on_own_tokens, False),
    "split": (split_after, False),
}
"""What wraps a module of a style, and whether it does so without sequence parallelism, too."""


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str],
    group: Group = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
) -> nn.Module:
    """Cut the parts of `module` that `plan` names, in place, and return it. All ranks of the group call this.

    The first rank of the group sends its weights, the whole model once, and its random state to all. Each
    rank keeps its parts under the same names; `cuts` says which box of the whole they are. Cut layers are new
    modules, so make the optimizer, call `recompute` and add hooks afterwards. The docstrings of the layers
    and operators say what they send.

    Args:
        module: the whole model, on every rank.
        plan: pattern -> style, where "*" stands for any letters between two dots.
        group: the ranks that share the model; None for all.
        sequence_parallel: between the cut layers, each rank has a share of the sequence (the last dimension
            but one of the activations) instead of a copy.
        overlap: see `column_linear`.

    Raises:
        ValueError: a pattern fits no part (the error suggests the nearest names); a style is unknown; a part
            has two styles, or is cut and has a hook or a parametrization such as weight_norm; there are more
            ranks than heads, rows or columns; a tied parameter is cut under only one of its names; or, under
            sequence parallelism, the plan leaves out a parameter.
        TypeError: a style cannot cut the part that it is given for.
    """
    parts, together = resolve(module, plan)
    check_ties(module, parts)
    if sequence_parallel:
        check_gradients_are_summed(module, parts)
    cut_between_heads(module, parts, together, len(ranks_of(group)))
    send_whole(module, group)
    share_random_state(group)
    made: dict[nn.Module, nn.Module] = {}
    parameters: dict[Tensor, nn.Parameter] = {}
    for part in parts.values():
        if part.dimension is not None:
            new = made[part.module] = _cut(part, group, sequence_parallel, overlap)
            for name, whole in part.module.named_parameters(recurse=False):
                setattr(new, name, parameters.setdefault(whole, getattr(new, name)))  # tied ones stay tied
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
        for name, parameter in parent._parameters.items():
            if parameter in parameters:  # another name of a cut parameter
                parent._parameters[name] = parameters[parameter]
    for part in parts.values():
        if part.style == "attention":
            work_on_own_heads(part.module, group)
        if part.style in _WRAPPERS:
            wrapper, always = _WRAPPERS[part.style]
            if always or sequence_parallel:
                wrap(part.module, wrapper, group)
    switch_fast_paths_off(module, TensorParallel)
    for names in together:
        layers = [made[parts[name].module] for name in names]
        shared = SharedInput([layer for layer in layers if isinstance(layer, ColumnParallelLinear)])
        for layer in shared.layers:
            layer.shared = shared
    return module


def _cut(part: StyledModule, group: Group, sequence_parallel: bool, overlap: bool) -> TensorParallel:
    module, style = part.module, part.style
    try:
        if isinstance(module, nn.Embedding):
            return VocabParallelEmbedding.from_embedding(module, group, sequence_parallel)
        if part.dimension == 1:
            return RowParallelLinear.from_linear(
                module, style == "row", group, sequence_parallel, unit=part.unit
            )
        gathered = style == "column_gathered"
        layer = ColumnParallelLinear.from_linear(
            module,
            gathered,
            group,
            sequence_parallel,
            unit=part.unit,
            overlap=overlap,
            packed=part.packed,
        )
        layer.is_vocabulary = style == "vocabulary"
        return layer
    except ValueError as error:
        raise ValueError(f"{part.name}: {error}") from None
