"""Tensor parallelism: a model whose matrices are shared by ranks, by a plan that names them.

>>> parallelize(model, {"layers.*.fc1": "column", "layers.*.fc2": "row"})

| style | for | what becomes of it |
|---|---|---|
| "column" | a Linear | its outputs are cut; each rank returns its own |
| "column_gathered" | a Linear | its outputs are cut; every rank returns all of them |
| "row" | a Linear | its inputs are cut, as a "column" layer before it returns them |
| "row_split" | a Linear | its inputs are cut; they come whole, and are split first |
| "vocabulary" | an Embedding | its rows are cut; every rank returns all of the vectors |
| "vocabulary" | a Linear | the last layer; each rank returns its part of the logits |
| "sequence" | norms, dropout | under sequence parallelism, works on a share of the sequence |
| "split" | an Embedding | under sequence parallelism, returns a share of the sequence |
| "random" | attention | has dropout inside, on this rank's heads: its random numbers are its own |

A last layer with style "vocabulary" goes with `vocab_parallel_cross_entropy`, or with `gather_logits` for
other losses. Layers of one parent that read one input, such as attention's queries, keys and values, are
named together with "|", as "layers.*.attention.query|key|value": they then send one message and not three.

What random numbers the other parts draw has to be the same on all ranks: they get the same state to start
with, and everything else that draws has to draw alike. A part with a `head_size` (or `head_dim`) is cut
between its heads; where keys and values have fewer, between these, with the queries that share them. Its
`forward` has to find the number of heads and the length in what its layers return, as in
`self.query(x).unflatten(-1, (-1, self.head_size))`: each rank has some of the heads, and under sequence
parallelism x is a share of the sequence, while what the layers return is of all of it.

Sources: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from minidist.comm.work import Group, ranks_of
from minidist.parallel.tensor.column_parallel import ColumnParallelLinear, SharedInput
from minidist.parallel.tensor.cuts import TensorParallel
from minidist.parallel.tensor.row_parallel import RowParallelLinear
from minidist.parallel.tensor.sequence_parallel import OnOwnTokens, SplitAfter, WithOwnRandomNumbers
from minidist.parallel.tensor.styles import (
    ROWS,
    StyledModule,
    check_sequence,
    check_ties,
    cut_between_heads,
    resolve,
)
from minidist.parallel.tensor.vocabulary import VocabParallelEmbedding
from minidist.parallel.tensor.whole_layers import send_whole
from minidist.parallel.training.random_state import share_random_state

_AROUND = {"sequence": OnOwnTokens, "split": SplitAfter}
"""What goes around a part under sequence parallelism."""


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str],
    group: Group = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
) -> nn.Module:
    """Cut the parts of `module` that `plan` names, in place. A collective: all ranks of the group call it.

    The weights are those of the group's first rank, and so is the state of torch's random numbers from then
    on: both are sent to all, the whole model once. Each rank keeps its parts, under the names of the whole;
    `cuts` says where in the whole they are. Make the optimizer afterwards, recompute afterwards, and add
    hooks afterwards: what is cut becomes a new module.

    Forward and backward: each layer's and operator's docstring says what it sends.

    Args:
        module: the whole model, on every rank.
        plan: for patterns of names, where "*" stands for any letters between two dots, a style; see the top
            of this file.
        group: the ranks that share the model; None for all.
        sequence_parallel: between the cut layers each rank has a share of the sequence, the last dimension
            but one of the activations, in place of a copy.
        overlap: see `column_linear`.

    Returns:
        `module`.

    Raises:
        ValueError: a pattern that fits no part, with the nearest names; an unknown style; two styles for one
            part; more ranks than heads, rows or columns; a tied parameter that is cut in one place only;
            under sequence parallelism a parameter that the plan says nothing of.
        TypeError: a part that its style cannot cut.
    """
    parts, together = resolve(module, plan)
    check_ties(module, parts)
    if sequence_parallel:
        check_sequence(module, parts)
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
    for part in parts.values():
        if part.style == "random":
            WithOwnRandomNumbers(part.module, group)
        elif part.style in _AROUND and sequence_parallel:
            _AROUND[part.style](part.module, group)
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
        assert isinstance(module, nn.Linear)
        if style in ROWS:
            return RowParallelLinear.from_linear(
                module, style == "row", group, sequence_parallel, unit=part.unit
            )
        gathered = style == "column_gathered"
        layer = ColumnParallelLinear.from_linear(
            module, gathered, group, sequence_parallel, unit=part.unit, overlap=overlap
        )
        layer.is_vocabulary = style == "vocabulary"
        return layer
    except ValueError as error:
        raise ValueError(f"{part.name}: {error}") from None
