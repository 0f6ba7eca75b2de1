"""Where this rank's part of the training state lies in the whole model.

A strategy knows the tensors of its own rank: parts of matrices with tensor parallelism, some of the layers
with a pipeline. A `TensorMap` maps each of them to a box of a tensor of the whole model, by its name in one
process, and says which copies count. So checkpoints do not depend on the layout, and norms equal one
process's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.mesh import Mesh
from minidist.comm.work import Group
from minidist.parallel.contract.tensor_boxes import TensorBox, common_part
from minidist.parallel.contract.training_state import names_of
from minidist.parallel.flat.joined_messages import TOGETHER_BYTES, broadcast_together, deal_to_buckets
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.sharding import state_by_name
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.tensor_parallel.cuts import Cut
from minidist.parallel.training.clipping import global_norm


class WholeModel:
    """Names, shapes and ties of a whole model, recorded before it is cut."""

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict(keep_vars=True)
        self.tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.parameters = [name for name, _ in model.named_parameters()]
        names = names_of(model)
        self.first = {name: names[p] for name, p in model.named_parameters(remove_duplicate=False)}


class TensorMap:
    """Where the tensors of this rank's part of a model lie in the whole model.

    model: this rank's part, with the names of `whole`. cuts: by name, how tensor parallelism cut a parameter.
    stage_of: by name, the pipeline stage that holds a tensor. experts: by name, which part of a parameter
    expert parallelism left here, of those on the ranks of `expert_ranks`.
    """

    def __init__(
        self,
        mesh: Mesh,
        whole: WholeModel,
        model: nn.Module,
        cuts: Mapping[str, Cut],
        stage_of: Mapping[str, int],
        experts: Mapping[str, Cut] | None = None,
        expert_ranks: Group = None,
    ) -> None:
        self.mesh, self.first, self._order = mesh, whole.first, whole.parameters
        self._tp, self._pp = mesh.group("tp"), mesh.group("pp")
        self.device = next((t.device for t in whole.tensors.values()), torch.device("cpu"))
        # The whole model's `state_dict` without values, and the stages of a pipeline that hold them.
        self.entries = {
            name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in whole.tensors.items()
        }
        self._stages = {name: stage_of.get(name, 0) for name in self.entries}
        # If a parameter has several names, its cut holds for all of them.
        own = dict(model.named_parameters(remove_duplicate=False))
        shared = {id(own[name]) for name in experts or {} if name in own}
        self._experts, self._expert_ranks = {n for n, p in own.items() if id(p) in shared}, expert_ranks
        both = {**cuts, **(experts or {})}
        by_identity = {id(own[name]): cut for name, cut in both.items() if name in own}
        self.cuts = {name: by_identity[id(p)] for name, p in own.items() if id(p) in by_identity}
        self._shapes = {name: tuple(p.shape) for name, p in own.items()}
        self._local = {whole.first[name]: name for _, name in reversed(names_of(model).items())}
        # Other ranks have these parameters too, and theirs count: tp's first rank has what tp does not cut,
        # and the stage of its first name a tied parameter.
        uncut = own.keys() - (self.cuts.keys() - self._experts) if mesh.rank("tp") else set()
        self._copies = uncut | {n for n in own if stage_of.get(self.first[n], 0) != mesh.rank("pp")}
        # Of parameters by their own names, and of the optimizer's state by the first ones.
        self._copies_of_state = {"model": uncut, "optimizer": {self.first[name] for name in self._copies}}
        self._groups: list[list[str]] | None = None  # of the optimizer, with all stages' parameters

    def join_groups(self, strategy: Sharded) -> None:
        """Join the optimizer's groups of all stages into those of one process; a collective with a pipeline.

        Sends 2 (n - 1) / n 8 (P + 2) bytes for P parameters of the whole model.

        Raises:
            ValueError: the optimizer function made different numbers of groups on two stages.
        """
        if self.mesh.size("pp") == 1:
            return
        groups = state_by_name.settings(strategy)["groups"]
        number_of = {self.first[name]: i for i, group in enumerate(groups) for name in group["params"]}
        numbers = [number_of.get(name, -1) for name in self._order]
        found = torch.tensor([*numbers, len(groups), -len(groups)], device=self.device)
        *numbers, most, least = comm.all_reduce(found, "max", group=self._pp).tolist()
        if most != -least:
            raise ValueError(
                f"optimizer makes {-least} groups of parameters on one stage of the pipeline and {most} on "
                "another; let it make as many for any parameters, some of them empty"
            )
        self._groups = [[n for n, g in zip(self._order, numbers, strict=True) if g == i] for i in range(most)]

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Turn a strategy's settings into the settings of one process."""
        groups = settings["groups"]
        if self._groups is not None:
            joined = zip(groups, self._groups, strict=True)
            groups = [{**group, "params": [*names]} for group, names in joined]
        state = {self.first.get(name, name): values for name, values in settings["state"].items()}
        return {**settings, "groups": groups, "state": state}

    def load_settings(
        self, strategy: Sharded, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Restore a strategy from the settings of one process; see `state_by_name.load_settings`."""
        have = [group["params"] for group in state_by_name.settings(strategy)["groups"]]
        groups = []
        for number, group in enumerate(settings["groups"]):
            saved = [self._local[name] for name in group["params"] if name in self._local]
            order = {name: index for index, name in enumerate(have[number])} if number < len(have) else {}
            groups.append({**group, "params": sorted(saved, key=lambda name: order.get(name, -1))})
        own = {self._local[name]: values for name, values in settings["state"].items() if name in self._local}
        shapes: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        for first, name in self._local.items():
            cut = self.cuts.get(name)
            for key, (shape, dtype) in state.get(first, {}).items():
                is_cut = cut is not None and tuple(shape) == tuple(cut.shape)
                here = self._shapes[name] if is_cut else tuple(shape)
                shapes.setdefault(name, {})[key] = here, dtype
        state_by_name.load_settings(strategy, {**settings, "groups": groups, "state": own}, shapes)

    def boxes(self, boxes: Iterable[TensorBox]) -> Iterator[TensorBox]:
        """Turn a strategy's boxes into boxes of the whole model's tensors, without padding."""
        for box in boxes:
            kind, _, name = box.name.partition(".")
            full = box.name
            if kind == "optimizer":
                name, _, key = name.rpartition(".")
                full = f"{kind}.{self.first.get(name, name)}.{key}"
            cut = self.cuts.get(name)
            if cut is None or box.shape != self._shapes[name]:
                yield box._replace(name=full)
                continue
            for start, offsets in cut.boxes():
                common = common_part(box.offsets, box.tensor.shape, start, cut.sizes)
                if common is not None:
                    here, there, sizes = common
                    at = tuple(o + f for o, f in zip(offsets, there, strict=True))
                    yield TensorBox(full, tuple(cut.shape), at, narrowed(box.tensor, here, sizes))

    @torch.no_grad()
    def write(self, whole: Mapping[str, Tensor], boxes: Iterable[TensorBox]) -> None:
        """Write whole parameters to this rank's boxes of them. A value that is the same stays as it is.

        A box may be a master weight, which has more digits than the parameter.
        """
        for box in boxes:
            new = whole.get(box.name.removeprefix("model."))
            if new is not None and box.name.startswith("model."):
                own, old = narrowed(new, box.offsets, box.tensor.shape), box.tensor
                own = own.to(old.device)
                old.copy_(torch.where(own == old.to(own.dtype), old, own.to(old.dtype)))

    def is_copy(self, name: str) -> bool:
        """Whether a box's tensor is on another rank too, whose ZeRO may cut it at other places."""
        kind, _, rest = name.partition(".")
        return (rest if kind == "model" else rest.rpartition(".")[0]) in self._copies_of_state[kind]

    def whole(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """For `Engine.whole`: join the tensors of all ranks into the whole model's, one by one."""
        if self.mesh.size("pp") == 1:
            return ((name, self._joined(name, value)) for name, value in own)
        return self._from_stages(dict(own))

    def _from_stages(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each stage in turn broadcasts its tensors to the others, in messages of up to 25 MB."""
        for stage in range(self.mesh.size("pp")):
            names = [name for name in self.entries if self._stages[name] == stage]
            shaped = [self.entries[name] for name in names]
            for indices in deal_to_buckets(shaped, range(len(names)), TOGETHER_BYTES):
                if stage == self.mesh.rank("pp"):
                    parts = [self._joined(names[i], own[names[i]]).detach().contiguous() for i in indices]
                else:
                    parts = [torch.empty_like(shaped[i], device=self.device) for i in indices]
                broadcast_together(parts, self._pp, stage)
                yield from zip((names[i] for i in indices), parts, strict=True)

    def _joined(self, name: str, own: Tensor) -> Tensor:
        """A tensor of this stage in full: the ranks that share it fill in their parts, and sum them."""
        if name not in self.cuts:
            return own
        whole = torch.zeros(self.entries[name].shape, dtype=own.dtype, device=own.device)
        self.cuts[name].put(own, whole)
        comm.all_reduce(whole, group=self._expert_ranks if name in self._experts else self._tp)
        return whole

    def norm(self, strategy: Sharded) -> float:
        """The norm of the whole model's gradients, in which each element counts once; the same on all ranks.

        Sends 2 (n - 1) / n 8 bytes: with tp or pp over all ranks of the world, otherwise over the ranks that
        share the gradients, if any do.
        """
        if self.mesh.size("tp") * self.mesh.size("pp") == 1:
            return strategy.norm()
        named = state_by_name.counted_gradients(strategy)
        # Copies count as zeros. The difference keeps what is not finite, which all ranks have to learn of.
        once = (gradient - gradient if name in self._copies else gradient for name, gradient in named)
        return global_norm(once, sharded=True)
