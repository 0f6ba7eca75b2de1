"""The layers of a model, whose outputs are compared, and the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential


def layers_of(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers in the model's lists, at any depth, and the modules beside the lists, with their names."""
    found = []
    for name, child in model.named_children():
        uncalled = isinstance(child, nn.ModuleList | nn.ModuleDict)  # and so without an output of its own
        holds_lists = any(isinstance(part, LISTS) for part in child.modules())
        if uncalled or (holds_lists and not isinstance(model, LISTS)):
            found += layers_of(child, f"{prefix}{name}.")
        else:
            found.append((prefix + name, child))
    return found


def in_order(layers: Sequence[str], called: Iterable[str], chunked: bool) -> list[str]:
    """The layers in the order in which a model calls them; those that it does not call come last.

    called: their names as they first ran, with a pipeline stage after stage. chunked: whether a stage has
    several runs of a list's layers, with layers of other stages in between. Then layers go by their index.
    """
    order = [*dict.fromkeys([*called, *layers])]
    if chunked:
        of_list: dict[str, list[str]] = {}
        for name in layers:
            of_list.setdefault(name.rpartition(".")[0], []).append(name)
        following = {name: iter(names) for name, names in of_list.items() if name}
        order = [next(following.get(name.rpartition(".")[0], iter([name]))) for name in order]
    return order
