"""A batch: a tensor, or tensors in tuples, lists, dicts and dataclasses, nested as they come.

The first dimension of every tensor is its rows. A list with one item for each row, such as the captions of
images, is cut and joined with them (`is_row_list`). Anything else stays as it is: a tensor without
dimensions, or an object of another class, in a tuple with a tensor that has the rows. These functions count,
cut, move and join the rows of a batch, and call a model with it. A single tensor takes a shortcut through
each of them.

A caller gives one batch or a list of them, with targets or without; `pairs_of` makes pairs of all forms.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minidist import comm

Pair = tuple[Any, Any]
"""Inputs and targets; the same object twice if the batch is one."""
Path = tuple[Any, ...]
"""Where a tensor lies: the index, key or field at each level."""


class Field(str):
    """A dataclass's field in a path. A mapping's key is no Field."""


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in a value, with their paths."""
    items: Any = ()
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif _is_dataclass(value):
        items = ((Field(each.name), getattr(value, each.name)) for each in dataclasses.fields(value))
    for key, each in items:
        yield from tensors_in(each, (*path, key))


def tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a batch, with names such as 'inputs["labels"]'."""
    for path, x in tensors_in(batch):
        steps = (
            f".{k}" if isinstance(k, Field) else f'["{k}"]' if isinstance(k, str) else f"[{k}]" for k in path
        )
        yield name + "".join(steps), x


def at(value: Any, path: Path) -> Any:
    """The value at a path of tuples, lists and mappings."""
    for key in path:
        value = value[key]
    return value


def mapped(
    change: Callable[[Any], Any],
    value: Any,
    kinds: Any = Tensor,
    of_list: Callable[[Any], Any] | None = None,
) -> Any:
    """The same structure with every tensor changed, or every object of `kinds`.

    Containers keep their class, such as transformers' BatchEncoding. What has not changed is the same object.
    of_list: changes lists and tuples that have no tensors, too.
    """
    if isinstance(value, kinds):
        return change(value)
    parts: Any
    if isinstance(value, Mapping):
        parts = value
    elif isinstance(value, list | tuple):
        if of_list is not None and not any(tensors_in(value)) and not hasattr(value, "_fields"):
            return of_list(value)
        parts = dict(enumerate(value))
    elif _is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        return value
    changed = {key: mapped(change, part, kinds, of_list) for key, part in parts.items()}
    if all(changed[key] is part for key, part in parts.items()):
        return value
    if isinstance(value, list | tuple):
        return type(value)(*changed.values()) if hasattr(value, "_fields") else type(value)(changed.values())
    if type(value) is dict or not (isinstance(value, MutableMapping) or _is_dataclass(value)):
        return changed
    result = copy.copy(value)
    # A dataclass may be frozen.
    put: Any = type(value).__setitem__ if isinstance(value, MutableMapping) else object.__setattr__
    for key, part in changed.items():
        put(result, key, part)
    return result


def rows_of(batch: Any) -> int:
    """The number of rows: that of the first tensor with dimensions. 0 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch)
    return next((len(x) for _, x in tensors(batch) if x.dim()), 0)


def with_a_row(batch: Any) -> Any:
    """The batch; one without rows gets a row of zeros, for models that cannot compute without any."""
    if rows_of(batch):
        return batch
    return mapped(lambda x: x.new_zeros((1, *x.shape[1:])) if x.dim() else x, batch)


def split(batch: Any, parts: int) -> Sequence[Any]:
    """The batch's rows in `parts` parts; the first ones have a row more if `parts` does not divide them."""
    if isinstance(batch, Tensor):
        return batch.tensor_split(parts)
    each, more = divmod(rows_of(batch), parts)
    starts = [part * each + min(part, more) for part in range(parts + 1)]
    return [rows(batch, slice(*ends)) for ends in pairwise(starts)]


def is_row_list(value: Any, count: int) -> bool:
    """Whether a list of anything but tensors, or a tuple of strings, has an item for each of so many rows.

    torch's loaders join the strings of rows to a list if a row is a dict, and to a tuple if it is a tuple.
    """
    if len(value) != count or any(tensors_in(value)):
        return False
    return isinstance(value, list) or (type(value) is tuple and all(isinstance(each, str) for each in value))


def rows(batch: Any, which: slice) -> Any:
    """Some rows of a batch."""
    count = rows_of(batch)

    def of_list(each: Any) -> Any:
        return each[which] if is_row_list(each, count) else each

    return mapped(lambda x: x[which] if x.dim() else x, batch, of_list=of_list)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on a device."""
    return mapped(lambda x: x.to(device), batch)


def shapes(batch: Any) -> tuple[Any, ...]:
    """The shape and the dtype of each tensor."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    return tuple((x.shape, x.dtype) for _, x in tensors(batch))


def joined(parts: Sequence[Any], like: Any = None) -> Any:
    """One batch of the rows of several that have the same structure.

    A tensor or a list is joined if it has the rows in every part; otherwise the first part's is taken.
    like: the part whose types and other fields the result copies; None for the first.
    """
    counts = [*map(rows_of, parts)]
    others = [iter([x for _, x in tensors(part)]) for part in parts]
    lists = [list[Any]() for _ in parts]
    for part, found in zip(parts, lists, strict=True):
        mapped(lambda x: x, part, of_list=found.append)
    of_lists = [iter(found) for found in lists]

    def join(_: Tensor) -> Tensor:
        pieces = [next(other) for other in others]
        have_rows = all(x.dim() and len(x) == count for x, count in zip(pieces, counts, strict=True))
        return torch.cat(pieces) if have_rows else pieces[0]

    def join_lists(first: Any) -> Any:
        pieces = [next(other, ()) for other in of_lists]
        have_rows = all(map(is_row_list, pieces, counts))
        return type(first)(item for piece in pieces for item in piece) if have_rows else first

    return mapped(join, parts[0] if like is None else like, of_list=join_lists)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call `model(**inputs)` with a mapping, `model(*inputs)` with a tuple or list, or `model(inputs)`."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def require_batch(inputs: Any, targets: Any) -> None:
    """TypeError if a batch has no tensors with rows, ValueError if they have different numbers of rows."""
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor) and inputs.dim() and targets.dim():
        if len(inputs) != len(targets):
            raise ValueError(
                f"inputs have {len(inputs)} rows and targets {len(targets)}; give one target for each row"
            )
        return
    given = (("inputs", inputs), ("targets", targets)) if targets is not inputs else (("batch", inputs),)
    found: list[tuple[str, Tensor]] = []
    for name, value in given:
        own = [(name, x) for name, x in tensors(value, name) if x.dim()]
        if not own:
            what = "tensor without dimensions" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"the {name} {'is' if name == 'batch' else 'are'} a {what}; give a tensor whose first "
                "dimension is the rows, or a dict, tuple or dataclass of such tensors; to pass what cannot "
                "be split, such as a graph, use a tuple with a tensor of the rows: (graph, rows)"
            )
        found += own
    first, most = found[0]
    for name, x in found[1:]:
        if len(x) != len(most):
            raise ValueError(
                f"{name} has {len(x)} rows, {first} {len(most)}; the first dimension of every tensor of a "
                "batch is its rows: give all of them the same number. Tensors with other rows, such as a "
                "graph's edges, go along uncut in an object of a class of yours, in a tuple with one that "
                "has the rows"
            )


def check_rows(inputs: Any, targets: Any, data_ranks: int = 1) -> int:
    """The number of this rank's rows; TypeError or ValueError if it cannot train on them."""
    require_batch(inputs, targets)
    count = rows_of(inputs)
    if count:
        return count
    if data_ranks == 1:
        raise ValueError("inputs have no rows; give a batch of at least one")
    raise ValueError(
        f"rank {comm.rank()} of {comm.size()} was given no rows; use a global batch of at least as many "
        f"rows as there are data-parallel ranks, {data_ranks}, or fewer ranks"
    )


class _Nothing:
    """Stands for targets that were not given; None would be a mistake."""


NOTHING: Any = _Nothing()


def pairs_of(inputs: Any, targets: Any, is_one: bool) -> list[Pair]:
    """The batches of a step as (inputs, targets).

    Without targets, a pair is inputs and targets, as loaders give them, and anything else is a batch. A list
    is of batches, unless it has a tensor in it: torch's loaders give batches as lists.

    is_one: whether the loss takes the batch as one, pair or not.
    """
    if targets is not NOTHING:
        batch = inputs, targets
        return [(batch, batch)] if is_one else [batch]
    if is_list(inputs):
        if not inputs:
            raise ValueError("the list of batches is empty; give at least one batch")
        return [pair for each in inputs for pair in pairs_of(as_batch(each), NOTHING, is_one)]
    batch = as_batch(inputs)
    if is_one or not isinstance(batch, tuple) or len(batch) != 2:
        return [(batch, batch)]
    return [batch]


def is_list(given: Any) -> bool:
    """Whether `given` is a list of batches, and not a batch."""
    return isinstance(given, list) and not any(isinstance(each, Tensor) for each in given)


def as_batch(given: Any) -> Any:
    """Turn a loader's list of tensors into a tuple; other batches stay as they are."""
    return tuple(given) if isinstance(given, list) else given


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
