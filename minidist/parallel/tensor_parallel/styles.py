"""Read and check a tensor-parallel plan: which module gets which style, and what the styles need.

replace_layers.py explains the styles. Mistakes in a plan are found here, before the model is changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from minidist._names import fits, fits_none, unknown
from minidist.parallel.tensor_parallel.cuts import TensorParallel, base_of
from minidist.parallel.tensor_parallel.linear_layers import linear_sizes
from minidist.parallel.tensor_parallel.vocabulary import check_embedding

STYLES: dict[str, int | None] = {
    "column": 0,
    "column_gathered": 0,
    "column_packed=3": 0,
    "row": 1,
    "row_split": 1,
    "vocabulary": 0,
    "sequence": None,
    "split": None,
    "random": None,
    "attention": None,
    "per_head": None,
}
"""The styles, and the dimension in which each cuts a weight; None for one that leaves weights whole."""


@dataclass
class StyledModule:
    """A module that the plan names."""

    name: str
    module: nn.Module
    style: str
    unit: int = 1
    packed: int = 1  # how many matrices lie below each other in the weight
    place: str = ""  # the name in the plan, for a part of a LoRA

    @property
    def dimension(self) -> int | None:
        """The dimension in which the weight is cut; None if it stays whole."""
        return STYLES[self.style]

    @property
    def size(self) -> int:
        """The size in the dimension that is cut, of the weight or of each matrix packed in it."""
        inputs, outputs = linear_sizes(self.module)
        return inputs if self.dimension else outputs // self.packed

    @property
    def parent(self) -> str:
        """The name of the module that contains this one."""
        return (self.place or self.name).rpartition(".")[0]


def resolve(module: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, StyledModule], list[list[str]]]:
    """Return the modules that a plan names, and the groups of names that read one input."""
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
        packed = re.fullmatch(r"column_packed=([1-9]\d*)", str(style))
        if style not in STYLES and packed is None:
            raise unknown("style", style, STYLES)
        style, count = (style, 1) if packed is None else ("column", int(packed[1]))
        siblings: dict[str, list[str]] = {}
        for alternative in alternatives(pattern):
            found = [alternative] if alternative in modules else [n for n in modules if fits(n, alternative)]
            if not found:
                raise fits_none(alternative, modules)
            for place in found:
                styles = _with_adapters(place, modules[place], style)
                for name, each in styles.items():
                    if name in parts:
                        both = f"{parts[name].style!r} and {each!r}"
                        raise ValueError(f"{name} has two styles in the plan, {both}; give it one")
                    parts[name] = StyledModule(name, modules[name], each, packed=count, place=place)
                    _check_kind(parts[name])
                siblings.setdefault(place.rpartition(".")[0], []).append(next(iter(styles)))
        if "|" in pattern:
            if style != "column":
                raise ValueError(
                    f"{pattern} has style {style!r}; names joined by | read one input, which is for 'column'"
                )
            together += siblings.values()
    return parts, together


def _with_adapters(name: str, module: nn.Module, style: str) -> dict[str, str]:
    """Return the layer's style by its name; for a LoRA, the styles of the layer inside and of its adapters.

    The adapter's matrix on the side where the layer is cut is cut the same way. The other one stays whole.
    """
    base: Any = base_of(module)
    if base is module:
        return {name: style}
    styles = {f"{name}.base_layer": style}
    if style == "row":
        beside = {"lora_dropout": "random", "lora_A": "row", "lora_B": "sequence"}
    elif style == "column" or (style == "vocabulary" and not isinstance(base, nn.Embedding)):
        beside = {"lora_dropout": "sequence", "lora_A": "sequence", "lora_B": "column"}
    else:
        return styles
    for part, each in beside.items():
        for adapter, inner in getattr(module, part, {}).items():
            if not isinstance(inner, nn.Identity):  # no dropout
                styles[f"{name}.{part}.{adapter}"] = each
    return styles


def alternatives(pattern: str) -> list[str]:
    """The names that a pattern joins: ["a.key", "a.value"] for "a.key|value"."""
    above, dot, last = pattern.rpartition(".")
    return [above + dot + each for each in last.split("|")]


def _check_kind(part: StyledModule) -> None:
    if isinstance(part.module, TensorParallel):
        raise TypeError(f"{part.name} is cut already; call parallelize once, with one plan")
    if part.dimension is None:
        return
    if lost := _hooks(part.module):
        raise ValueError(
            f"{part.name} has {lost}, and the cut layer that replaces it would not; remove it, or leave "
            f"{part.name} out of the plan. Hooks that work with a part of the features can be added to the "
            "cut layer, after parallelize or prepare"
        )
    try:
        if part.style == "vocabulary" and isinstance(part.module, nn.Embedding):
            check_embedding(part.module)
        else:
            _, outputs = linear_sizes(part.module)
            if outputs % part.packed:
                raise ValueError(f"{part.packed} equal matrices have no {outputs} outputs; give a divisor")
    except (TypeError, ValueError) as error:
        style = part.style if part.packed == 1 else f"{part.style}_packed={part.packed}"
        raise type(error)(f"{part.name} with style {style!r}: {error}") from None


def _hooks(module: nn.Module) -> str:
    """A parametrization or a hook of a module or its parameters, in words; "" if there is none."""
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        name, (first, *_) = next(iter(lists.items()))
        return f"a parametrization of its {name}, {type(first).__name__.lstrip('_')}"
    if "forward" in vars(module):
        return "a forward method of its own"
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    found = [(f"a {kind.replace('_', ' ')} hook", getattr(module, f"_{kind}_hooks")) for kind in kinds]
    for name, parameter in module.named_parameters(recurse=False):
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
            found.append((f"a gradient hook on its {name}", hooks))
    for what, hooks in found:
        for hook in (hooks or {}).values():
            return f"{what}, {getattr(hook, '__name__', type(hook).__name__)}"
    return ""


def check_ties(module: nn.Module, parts: Mapping[str, StyledModule]) -> None:
    """Raise ValueError if a tied parameter is not cut the same way under each of its names.

    A module around a cut layer may have another name for the layer's parameter, as BERT has for the bias of
    its logits.
    """
    by_module = {part.module: part for part in parts.values()}  # a module may have several names, too
    cut: dict[Tensor, tuple[str, tuple[int, int] | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        part = by_module.get(module.get_submodule(owner))
        alike = None if part is None or part.dimension is None else (part.dimension, part.packed)
        if last == "bias" and alike == (1, 1):
            alike = None
        other, before = cut.setdefault(parameter, (name, alike))
        above, below = sorted((owner, other.rpartition(".")[0]), key=len)
        if before != alike and not below.startswith(f"{above}."):
            raise ValueError(
                f"{other} and {name} are one parameter, and the plan does not cut both alike; give both a "
                "style that cuts the same dimension, or none"
            )


def check_gradients_are_summed(module: nn.Module, parts: Mapping[str, StyledModule]) -> None:
    """Raise ValueError if a gradient that covers only a share of the sequence would not be summed."""
    for name, _ in module.named_parameters():
        owner = name.rpartition(".")[0]
        above = [".".join(owner.split(".")[:end]) for end in range(1, owner.count(".") + 2)]
        if not any(each in parts and parts[each].style not in ("random", "attention") for each in above):
            raise ValueError(
                f"the plan does not name {owner or 'the module itself'}, whose gradients would cover only a "
                "share of the sequence; give it a style, such as 'sequence', or leave out sequence_parallel"
            )
    if not any(part.style == "sequence" for part in parts.values()):
        raise ValueError(
            "sequence_parallel is True, but no part of the plan has style 'sequence'; say which parts work "
            "on a share of the sequence, or leave it out"
        )
