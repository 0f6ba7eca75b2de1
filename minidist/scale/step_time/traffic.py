"""Seconds of the messages between ranks: which links they use, and what each axis of a layout sends.

Ranks are numbered as in `comm.mesh`: tp innermost, then cp, dp and pp. A group that lies on one host uses the
links inside the host. Any other group uses the network, with as many cards as it has ranks on a host. The dp
ranks have three kinds of groups inside: "shares" own a share of one copy of the state each, "copies" own the
same share, and "secondary" share a second copy of the parameters.

Sources: NVIDIA/nccl, src/graph/tuning.cc (a ring's hops within and between hosts); Shoeybi et al. 2019,
section 3 (tp); Korthikanti et al. 2022, section 4 (sequence parallelism); Liu et al. 2023 and Jacobs et al.
2023 (cp). The bytes are those that minidist's strategies document.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from minidist.comm.cost import predict
from minidist.comm.cost.links import LinkProfile
from minidist.parallel.contract.layout import Layout
from minidist.scale.memory.training_setup import TrainingSetup
from minidist.scale.step_time.hardware import Crowd, Hardware

ALGORITHMS = {
    "all_reduce": ("ring", "halving_doubling"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
    "all_to_all": ("direct",),
}
"""Algorithms between devices: rings, and for small tensors one with few rounds, such as NCCL's trees."""


@dataclass(frozen=True)
class Wires:
    """The links between the ranks of a layout."""

    hardware: Hardware
    setup: TrainingSetup
    known: dict[tuple[str, float, str], float] = field(default_factory=dict, compare=False)  # a cache

    @property
    def layout(self) -> Layout:
        """The layout whose ranks are joined."""
        return self.setup.layout

    @cached_property
    def crowd(self) -> Crowd:
        """Figures for the ranks of one host."""
        return self.hardware.crowd(self.layout.ranks)

    def stride(self, axis: str) -> int:
        """The difference in rank between neighbours in the axis's groups."""
        tp, cp, dp = self.layout.tp, self.layout.cp, self.layout.dp
        # Gradients are summed over dp and cp together.
        return {"tp": 1, "pp": tp * cp * dp, "copies": tp * self.layout.owners}.get(axis, tp)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks in each of an axis's groups; dp includes cp."""
        ranks, shares = self.layout.dp * self.layout.cp, self.layout.owners
        return {
            **{axis: getattr(self.layout, axis) for axis in ("tp", "pp", "cp", "ep", "trading")},
            "dp": ranks,
            "shares": shares,
            "copies": ranks // shares,
            "secondary": self.setup.secondary or shares,
        }

    def collective(self, operation: str, bytes_: float, axis: str) -> float:
        """Seconds of a collective to which each rank gives a tensor of so many bytes."""
        ranks, key = self.sizes[axis], (operation, bytes_, axis)
        if ranks == 1 or not bytes_:
            return 0.0
        if key not in self.known:
            profiles = {name: self._profile(axis, name) for name in ALGORITHMS[operation]}
            self.known[key] = min(
                predict(operation, "shared_memory" if profile.memory else name, bytes_, ranks, profile)
                for name, profile in profiles.items()
            )
        return self.known[key]

    def _profile(self, axis: str, algorithm: str) -> LinkProfile:
        """The links of a group: a host's, or the network's with the cards of all its ranks on a host.

        If a host has several of its ranks, most hops of a ring stay inside a host. All hops of halving and
        doubling count as the network's.
        """
        inside = self._inside(axis)
        if inside is not None:
            return inside
        size = self.sizes[axis]
        cards = max(1, min(size, self.hardware.ranks_per_host // self.stride(axis)))
        profile, hop = self.hardware.between, self.hardware.inside.links["messages"]
        link = profile.links["messages"]
        alpha = link.alpha
        if algorithm == "ring":
            crossed = -(-size // cards) - 1  # hops from host to host
            alpha = (crossed * link.alpha + (size - 1 - crossed) * hop.alpha) / (size - 1)
        together = replace(link, alpha=alpha, beta=max(link.beta / cards, hop.beta))
        return replace(profile, links={"messages": together})

    def _inside(self, axis: str) -> LinkProfile | None:
        """The host's links, if each of the axis's groups lies on one host."""
        if self.stride(axis) * self.sizes[axis] > self.hardware.ranks_per_host:
            return None
        return self.crowd.links or self.hardware.inside

    def message(self, bytes_: float, axis: str) -> float:
        """Seconds of a message to the next rank of the axis."""
        link = (self._inside(axis) or self.hardware.between).links["messages"]
        busy = link.beta if link.busy_beta is None else link.busy_beta
        return link.alpha + busy * bytes_

    # Tensor parallelism. `stream` is the bytes of a stream of activations.

    def tensor_parallel(self, stream: float, vector: float, experts: float = 0.0) -> tuple[float, float]:
        """Seconds of a block's messages, forward and backward.

        stream: bytes of the activations between blocks. vector: bytes of a bias. experts: bytes of the router
        and the experts, 0 in a block without. They are not cut, so that only attention sends its stream; with
        sequence parallelism each rank has its own tokens' gradients of them, which an all-reduce sums.
        """
        cut = 1 if experts else 2  # parts of the block
        if not self.layout.sequence_parallel:
            each = self.collective("all_reduce", stream, "tp")
            return cut * each, cut * each
        gather, scatter = self._gather(stream), self.collective("reduce_scatter", stream, "tp")
        # The backward pass gathers inputs again, and sums the gradients of biases and of two norms.
        bias, norm = (self.collective("all_reduce", many * vector, "tp") for many in (1, 2))
        mlp = self.collective("all_reduce", experts, "tp") if experts else 0.0
        return cut * (gather + scatter), cut * (2 * gather + scatter + bias) + 2 * norm + mlp

    def first_layer(self, stream: float, positions: float) -> tuple[float, float]:
        """Seconds of messages for the token table, cut by vocabulary, and so many bytes of positions."""
        if not self.layout.sequence_parallel:
            return self.collective("all_reduce", stream, "tp"), 0.0
        gathered = self._gather(stream) + self._gather(positions)
        return self.collective("reduce_scatter", stream, "tp"), gathered

    def last_layer(self, stream: float, vector: float, tokens: int) -> tuple[float, float]:
        """Seconds of messages for norm, scores and loss, which gathers three float32 numbers per token."""
        loss = self.collective("all_gather", 12.0 * tokens, "tp")
        if not self.layout.sequence_parallel:
            return loss, self.collective("all_reduce", stream, "tp")
        gather, scatter = self._gather(stream), self.collective("reduce_scatter", stream, "tp")
        return loss + gather, gather + scatter + self.collective("all_reduce", 2 * vector, "tp")

    def _gather(self, stream: float) -> float:
        return self.collective("all_gather", stream / self.layout.tp, "tp")

    def traded(self, keys: float) -> float:
        """Seconds in which a block trades tokens for heads and back, for so many bytes of a rank's keys."""
        return sum(self.collective("all_to_all", many * keys, "trading") for many in (3, 1))

    def routed(self, rows: float, experts: int) -> tuple[float, float]:
        """Seconds in which so many bytes of rows go to their experts and back, forward and backward.

        Before, ranks tell how many rows each expert gets.
        """
        each = self.collective("all_to_all", rows, "ep")
        return 2 * each + self.collective("all_to_all", 8.0 * experts, "ep"), 2 * each

    def ring(self, keys: float, element: int) -> tuple[float, float]:
        """Seconds of a block's ring attention, forward and backward, for so many bytes of a rank's keys.

        Keys and values go round the ring; backward, their gradients follow in float32 or wider.
        """
        hops = self.layout.cp // self.layout.trading - 1
        forward = hops * self.message(2 * keys, "cp")
        return forward, forward + hops * self.message(2 * keys * max(element, 4) / element, "cp")
