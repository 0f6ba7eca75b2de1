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

The last layer of a model goes with `vocab_parallel_cross_entropy`. Layers of one parent that read one input,
such as attention's queries, keys and values, are named together with "|", as
"layers.*.attention.query|key|value": they then send one message in place of three.

What random numbers the other parts draw has to be the same on all ranks: they get the same state to start
with, and everything else that draws has to draw alike. A part with a `head_size` (or `head_dim`) is cut
between its heads; where keys and values have fewer, between these, with the queries that share them.

Sources: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from minidist._names import unknown
from minidist.comm.work import Group, ranks_of
from minidist.parallel.patterns import fits, fits_none
from minidist.parallel.random_state import share_random_state
from minidist.parallel.sequence_parts import OnOwnTokens, SplitAfter, WithOwnRandomNumbers
from minidist.parallel.tensor_cuts import TensorParallel
from minidist.parallel.tensor_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedInput,
    check_linear,
    send_whole,
)
from minidist.parallel.vocabulary import VocabParallelEmbedding, check_embedding

STYLES = ("column", "column_gathered", "row", "row_split", "vocabulary", "sequence", "split", "random")
COLUMNS, ROWS = ("column", "column_gathered"), ("row", "row_split")


@dataclass
class _Part:
    """A module that the plan names."""

    name: str
    module: nn.Module
    style: str
    unit: int = 1

    @property
    def dimension(self) -> int | None:
        """In which the weight is cut."""
        if self.style in ("sequence", "split", "random"):
            return None
        return 1 if self.style in ROWS else 0

    @property
    def size(self) -> int:
        """Of the weight, in the dimension that is cut."""
        assert isinstance(self.module, nn.Linear)
        return self.module.in_features if self.dimension else self.module.out_features

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


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
    `cuts` says where in the whole they are. Make the optimizer afterwards, and recompute afterwards.

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
    parts, together = _resolve(module, plan)
    _check_ties(module, parts)
    if sequence_parallel:
        _check_sequence(module, parts)
    _cut_between_heads(module, parts, len(ranks_of(group)))
    send_whole(module, group)
    share_random_state(group)
    made: dict[nn.Module, nn.Module] = {}
    parameters: dict[Tensor, nn.Parameter] = {}
    for part in parts.values():
        if part.dimension is not None:
            new = made[part.module] = _cut(part, group, sequence_parallel, overlap)
            for name, whole in part.module.named_parameters(recurse=False):
                setattr(new, name, parameters.setdefault(whole, getattr(new, name)))
        elif part.style == "random":
            WithOwnRandomNumbers(part.module, group)
        elif sequence_parallel:
            {"sequence": OnOwnTokens, "split": SplitAfter}[part.style](part.module, group)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if child in made:
                setattr(parent, name, made[child])
    for names in together:
        layers = [made[parts[name].module] for name in names]
        shared = SharedInput([layer for layer in layers if isinstance(layer, ColumnParallelLinear)])
        for layer in shared.layers:
            layer.shared = shared
    return module


def _resolve(module: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, _Part], list[list[str]]]:
    """The parts that a plan names, and those that read one input."""
    modules = {name: part for name, part in module.named_modules() if name}
    parts: dict[str, _Part] = {}
    together: list[list[str]] = []
    for pattern, style in plan.items():
        if style not in STYLES:
            raise unknown("style", style, STYLES)
        above, dot, last = pattern.rpartition(".")
        siblings: dict[str, list[str]] = {}
        for alternative in last.split("|"):
            found = [name for name in modules if fits(name, above + dot + alternative)]
            if not found:
                raise fits_none(above + dot + alternative, modules)
            for name in found:
                if name in parts:
                    raise ValueError(
                        f"{name} has two styles in the plan, {parts[name].style!r} and {style!r}; give it one"
                    )
                part = parts[name] = _Part(name, modules[name], style)
                _check_kind(part)
                siblings.setdefault(part.parent, []).append(name)
        if "|" in last:
            if style != "column":
                raise ValueError(
                    f"{pattern} has style {style!r}; names joined by | read one input, which is for 'column'"
                )
            together += siblings.values()
    return parts, together


def _check_kind(part: _Part) -> None:
    if isinstance(part.module, TensorParallel):
        raise TypeError(f"{part.name} is cut already; call parallelize once, with one plan")
    if part.dimension is None:
        return
    try:
        if part.style == "vocabulary" and isinstance(part.module, nn.Embedding):
            check_embedding(part.module)
        else:
            check_linear(part.module)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{part.name} with style {part.style!r}: {error}") from None


def _check_ties(module: nn.Module, parts: Mapping[str, _Part]) -> None:
    """A parameter with several names has to be cut alike under each."""
    cut: dict[Tensor, tuple[str, int | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        part = parts.get(owner)
        dimension = None if part is None else part.dimension
        if last == "bias" and dimension == 1:
            dimension = None
        other, before = cut.setdefault(parameter, (name, dimension))
        if before != dimension:
            raise ValueError(
                f"{other} and {name} are one parameter, and the plan does not cut both alike; give both a "
                "style that cuts the same dimension, or none"
            )


def _check_sequence(module: nn.Module, parts: Mapping[str, _Part]) -> None:
    """Every gradient has to be summed over the shares of the sequence by somebody."""
    for name, _ in module.named_parameters():
        owner = name.rpartition(".")[0]
        above = [".".join(owner.split(".")[:end]) for end in range(1, owner.count(".") + 2)]
        if not any(each in parts and parts[each].style != "random" for each in above):
            raise ValueError(
                f"the plan says nothing of {owner or 'the module itself'}, whose gradients would be of a "
                "share of the sequence only; give it a style, such as 'sequence', or leave out "
                "sequence_parallel"
            )
    if not any(part.style == "sequence" for part in parts.values()):
        raise ValueError(
            "sequence_parallel is True, and no part of the plan has style 'sequence'; say which parts work "
            "on a share of the sequence, or leave it out"
        )


def _cut_between_heads(module: nn.Module, parts: Mapping[str, _Part], ranks: int) -> None:
    """Give the linear parts of attention the units that they can be cut into."""
    by_parent: dict[str, list[_Part]] = {}
    for part in parts.values():
        if isinstance(part.module, nn.Linear) and part.style in ("column", "row"):
            by_parent.setdefault(part.parent, []).append(part)
    for parent, siblings in by_parent.items():
        above = module.get_submodule(parent)
        head = getattr(above, "head_size", getattr(above, "head_dim", None))
        if not isinstance(head, int):
            continue
        sizes = [part.size for part in siblings]
        heads = min(sizes) // head
        if heads < ranks:
            raise ValueError(
                f"{parent} has {heads} heads of keys and values, which {ranks} tensor-parallel ranks cannot "
                f"share; use at most {heads}"
            )
        for part, size in zip(siblings, sizes, strict=True):
            if size % (heads * head):
                raise ValueError(
                    f"{part.name} has size {size}, which is no multiple of {heads} heads of {head}; give "
                    f"{parent} queries in a multiple of the heads of its keys and values"
                )
            part.unit = size // heads


def _cut(part: _Part, group: Group, sequence_parallel: bool, overlap: bool) -> TensorParallel:
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
