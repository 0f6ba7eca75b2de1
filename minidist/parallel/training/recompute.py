"""Activation recomputation: keep only the inputs of some parts, and compute the rest again in backward.

A layer's activations are many times its input. If each layer keeps its input and computes the others again
when the backward pass arrives, a model holds one input a layer and the activations of one layer. The price is
one more forward pass, a third more computation. Recomputing only chosen parts, such as attention, saves most
of the memory for less. Dropout draws the same numbers the second time, so gradients are the same to the last
bit.

contract/recompute_policies.py has the policies that a layout can name. To add one that chooses other parts,
write its function and its record there. To change what a part keeps, or where (on the CPU, say), change the
two contexts that `_Recomputed.__call__` gives to torch's `checkpoint`.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4; Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 5 (chosen parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minidist._names import fits, fits_none
from minidist.comm.opaque import opaque
from minidist.parallel.contract.kept_attributes import State, differs, state_of
from minidist.parallel.contract.recompute_policies import policy_of
from minidist.parallel.training.activation_memory import ActivationCounter

LARGE = 2**16
"""Elements of a tensor of a part's state that is not copied in each call."""


def recompute(module: nn.Module, parts: str | Sequence[str] | None = None) -> nn.Module:
    """Make parts of `module` compute their activations again in the backward pass, in place, and return it.

    >>> recompute(model)  # whole layers
    >>> recompute(model, ["layers.*.attention", "layers.*.mlp"])

    Parts get another `forward`; all names stay. Parts may contain each other. Buffers that a part updates,
    such as BatchNorm's statistics or a codebook, are updated once, and a part computes again with those that
    it had; so with attributes that are tensors, numbers or None. Where no gradients are computed, nothing is
    kept or computed again.

    parts: names of submodules, as in `named_modules`, where "*" stands for any letters between two dots; None
    for the layers, which are the children of each outermost `ModuleList` and `Sequential`. Raises ValueError
    if a pattern fits no part, or there are no layers.
    """
    if parts is None:
        return recompute_by(module, True)
    names = [name for name, _ in module.named_modules() if name]
    patterns = [parts] if isinstance(parts, str) else [*parts]
    for pattern in patterns:
        if not any(fits(name, pattern) for name in names):
            raise fits_none(pattern, names)
    return recompute_parts(module, [n for n in names if any(fits(n, pattern) for pattern in patterns)])


def recompute_by(module: nn.Module, policy: bool | str) -> nn.Module:
    """Make `module` recompute as `Layout(recompute=policy)` says, in place, and return it."""
    return recompute_parts(module, parts_to_recompute(module, policy))


def parts_to_recompute(module: nn.Module, policy: bool | str) -> list[str]:
    """The names of the parts that `Layout(recompute=policy)` recomputes; ValueError if there are none."""
    record = policy_of(policy)
    if record is None:
        return []
    layers = _layers(module)
    names = [name for name, _ in module.named_modules() if name]
    chosen = [*record.chooses(layers, names)]
    if not chosen:
        what = (
            f"parts that recompute={policy!r} would choose"
            if layers
            else ("ModuleList or Sequential whose layers could be recomputed")
        )
        raise ValueError(
            f"a {type(module).__name__} has no {what}; leave recompute out of the layout, and before "
            "md.prepare name the parts: "
            'minidist.parallel.training.recompute.recompute(model, ["encoder", "decoder"]), for example'
        )
    return chosen


def recompute_parts(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Make the parts with these names recompute, in place, as far as `module` has them; return it."""
    parts = dict(module.named_modules())
    for part in (parts[name] for name in names if name in parts):
        if not isinstance(part.forward, _Recomputed):
            part.forward = _Recomputed(part)
    return module


def recomputes(module: nn.Module) -> bool:
    """Whether `recompute` has changed `module` or one of its parts."""
    return bool(recomputed_in(module))


def recomputed_in(module: nn.Module) -> list[nn.Module]:
    """`module` and its parts, as far as `recompute` has changed them."""
    return [part for part in module.modules() if isinstance(part.__dict__.get("forward"), _Recomputed)]


def _layers(module: nn.Module, prefix: str = "") -> list[str]:
    """The names of the children of the outermost lists of layers."""
    found = []
    for name, child in module.named_children():
        # A ModuleList among the layers is never called itself; a Sequential is.
        if isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList):
            found.append(prefix + name)
        else:
            found += _layers(child, f"{prefix}{name}.")
    return found


class _Recomputed:
    """The `forward` of a part that is recomputed."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._own = part.__dict__.get("forward")  # set if another wrapper has replaced the class's forward
        self._written: set[tuple[int, str]] | None = None  # large tensors of its state that calls change

    def __getstate__(self) -> dict[str, Any]:
        """For copies, whose tensors have other places."""
        return {**self.__dict__, "_written": None}

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own or partial(type(self._part).forward, self._part)
        disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if not torch.is_grad_enabled() or disabled is not None:  # as by torch.func
            return own(*args, **kwargs)
        # A layer of transformers would fill its model's cache of keys and values twice.
        args = tuple(None if _is_empty_cache(value) else value for value in args)
        forward = partial(
            own, **{k: None if _is_empty_cache(value) else value for k, value in kwargs.items()}
        )
        counter, (state, untouched) = ActivationCounter.active(), self._state()
        contexts = nullcontext(), _Again(self._part, counter, state)
        outputs = checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts)
        if self._written is None:
            changed = [(s, name, old) for s, name, old in state if _is_large(old) and differs(s[name], old)]
            state[:] = [each for each in state if not _is_large(each[2])] + changed
            self._written = {(id(store), name) for store, name, _ in changed}
        for (store, name, old), version in untouched:
            if store.get(name) is not old:  # which keeps its values
                state.append((store, name, old))
            elif old._version != version:
                raise RuntimeError(
                    f"{name} of shape {tuple(old.shape)} changed in place in a part that is recomputed, and "
                    "not in the part's first call, so its old values were not kept; assign a new tensor to "
                    "it, or leave this part out of what is recomputed"
                )
        return outputs

    def _state(self) -> tuple[State, list[tuple[tuple[dict[str, Any], str, Tensor], int]]]:
        """Copies of the state that this call may change, and large tensors that no call has changed yet.

        Small tensors are copied in every call. Of large ones the first call shows which it changes.
        """
        copies, untouched = [], []
        for store, name, value in state_of(self._part):
            if _is_large(value) and self._written is not None and (id(store), name) not in self._written:
                untouched.append(((store, name, value), value._version))
            else:
                copies.append((store, name, _copied(value)))
        return copies, untouched


def _copied(value: Any) -> Any:
    """A copy; but a tensor that was computed, such as a pruned weight, itself: it gets a gradient."""
    return value.detach().clone() if isinstance(value, Tensor) and value.grad_fn is None else value


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > LARGE


def _is_empty_cache(value: object) -> bool:
    """Whether it is a `Cache` of transformers without tokens, which a layer can do without."""
    length = getattr(value, "get_seq_length", None)
    return callable(length) and length() == 0


class _Again:
    """A context in which a part computes again, with copies of its state at its call, and is counted.

    It may be entered several times: by a recorded backward pass, and by one through that.
    """

    def __init__(self, part: nn.Module, counter: ActivationCounter | None, state: State) -> None:
        self._part, self._counter, self._state = part, counter, state

    def __enter__(self) -> None:
        self._now = state_of(self._part)
        for store, name, value in [*self._now, *self._state]:
            store[name] = _copied(value)
        self._counting = nullcontext() if self._counter is None else self._counter.with_other_hooks()
        self._counting.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._counting.__exit__(*error)
        for store, name, value in self._now:
            store[name] = value
