"""A plan of tensor parallelism read and checked: which parts of a model get which style, and what that needs.

The styles themselves are explained in parallelize.py. What a plan gets wrong is found here, before any
part of the model is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from minidist._names import unknown
from minidist.parallel.guards.name_patterns import fits, fits_none
from minidist.parallel.tensor.cuts import TensorParallel
from minidist.parallel.tensor.vocabulary import check_embedding
from minidist.parallel.tensor.whole_layers import check_linear

STYLES = ("column", "column_gathered", "row", "row_split", "vocabulary", "sequence", "split", "random")
ROWS = ("row", "row_split")


@dataclass
class StyledModule:
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
        """The name of the module that it is in."""
        return self.name.rpartition(".")[0]


def resolve(module: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, StyledModule], list[list[str]]]:
    """The parts that a plan names, and those that read one input."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}; give a torch.nn.Module, whole, on every rank")
    if not isinstance(plan, Mapping):
        raise TypeError(f'plan is {plan!r}; give a dictionary such as {{"layers.*.fc1": "column"}}')
    modules = {name: part for name, part in module.named_modules() if name}
    parts: dict[str, StyledModule] = {}
    together: list[list[str]] = []
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"the plan names {pattern!r}; give names of the module's parts, as text")
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
                part = parts[name] = StyledModule(name, modules[name], style)
                _check_kind(part)
                siblings.setdefault(part.parent, []).append(name)
        if "|" in last:
            if style != "column":
                raise ValueError(
                    f"{pattern} has style {style!r}; names joined by | read one input, which is for 'column'"
                )
            together += siblings.values()
    return parts, together


def _check_kind(part: StyledModule) -> None:
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


def check_ties(module: nn.Module, parts: Mapping[str, StyledModule]) -> None:
    """A parameter with several names has to be cut alike under each."""
    by_module = {part.module: part for part in parts.values()}  # which may be in several places, too
    cut: dict[Tensor, tuple[str, int | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        part = by_module.get(module.get_submodule(owner))
        dimension = None if part is None else part.dimension
        if last == "bias" and dimension == 1:
            dimension = None
        other, before = cut.setdefault(parameter, (name, dimension))
        if before != dimension:
            raise ValueError(
                f"{other} and {name} are one parameter, and the plan does not cut both alike; give both a "
                "style that cuts the same dimension, or none"
            )


def check_sequence(module: nn.Module, parts: Mapping[str, StyledModule]) -> None:
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


def cut_between_heads(
    module: nn.Module, parts: Mapping[str, StyledModule], together: Sequence[Sequence[str]], ranks: int
) -> None:
    """Give the linear parts of attention the units that they can be cut into.

    Queries, keys and values are the parts that read one input; where no plan says so, all in their parent.
    What reads the heads' results has as many inputs as there are queries.
    """
    by_parent: dict[str, list[StyledModule]] = {}
    for part in parts.values():
        if isinstance(part.module, nn.Linear) and part.style in ("column", "row"):
            by_parent.setdefault(part.parent, []).append(part)
    for parent, siblings in by_parent.items():
        above = module.get_submodule(parent)
        head = getattr(above, "head_size", getattr(above, "head_dim", None))
        if not isinstance(head, int):
            continue
        joined = [[parts[name] for name in names] for names in together if parts[names[0]].parent == parent]
        units: dict[int, int] = {}
        for members in joined or [siblings]:
            if not any(part.size % head for part in members):  # else it is no map to heads
                units |= _units_of(parent, members, head, ranks)
        for part in siblings:
            part.unit = units.get(part.size, 1)


def _units_of(parent: str, members: Sequence[StyledModule], head: int, ranks: int) -> dict[int, int]:
    """For each size of some maps to heads what stays together: the heads that share keys and values."""
    heads = min(part.size for part in members) // head
    if heads < ranks:
        raise ValueError(
            f"{parent} has {heads} heads of keys and values, which {ranks} tensor-parallel ranks cannot "
            f"share; use at most {heads}"
        )
    for part in members:
        if part.size % (heads * head):
            raise ValueError(
                f"{part.name} has size {part.size}, which is no multiple of {heads} heads of {head}; give "
                f"{parent} queries in a multiple of the heads of its keys and values"
            )
    return {part.size: part.size // heads for part in members}
