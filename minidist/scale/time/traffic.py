"""Seconds of the messages between ranks: which links they take, and what each axis of a layout sends.

Ranks lie as in `comm.mesh`: tp innermost, then cp, dp and pp. A group whose ranks are all on one host talks
inside it; any other at the rate of the network, over as many cards as it has ranks on a host.

Sources: NVIDIA/nccl, src/graph/tuning.cc (a ring's hops between hosts, and the rest); Shoeybi et al. 2019,
section 3 (tp); Korthikanti et al. 2022, section 4 (sequence parallelism); Liu et al. 2023 (cp). The bytes are
those that minidist's strategies document: see
`tensor_plans.bytes_per_pass`, `context_parallel.ring_bytes` and each strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minidist.comm.cost import predict
from minidist.comm.cost.links import LinkProfile
from minidist.parallel.contract.layout import Layout
from minidist.scale.time.rates import Crowd, Hardware

ALGORITHMS = {
    "all_reduce": ("ring", "halving_doubling"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
}
"""What is taken between devices: rings, and for small tensors an algorithm of few rounds, as NCCL's trees."""


@dataclass(frozen=True)
class Wires:
    """How the ranks of a layout are connected.

    hardware: the machines. crowd: what holds for the ranks of one host. layout: who talks to whom.
    """

    hardware: Hardware
    crowd: Crowd
    layout: Layout
    known: dict[tuple[str, float, str], float] = field(default_factory=dict, compare=False)  # asked before

    def stride(self, axis: str) -> int:
        """Ranks from one member of the axis's groups to the next."""
        layout = self.layout
        return {
            "tp": 1,
            "cp": layout.tp,
            "dp": layout.tp,  # with cp: gradients are summed over both
            "pp": layout.tp * layout.cp * layout.dp,
        }[axis]

    def size(self, axis: str) -> int:
        """Ranks of the axis's groups; dp's have cp's, too."""
        layout = self.layout
        return layout.dp * layout.cp if axis == "dp" else int(getattr(layout, axis))

    def collective(self, operation: str, bytes_: float, axis: str) -> float:
        """Seconds of a collective in which each rank passes a tensor of so many bytes."""
        ranks, key = self.size(axis), (operation, bytes_, axis)
        if ranks == 1 or not bytes_:
            return 0.0
        if key not in self.known:
            self.known[key] = min(
                _cost(operation, name, bytes_, ranks, self._profile(axis, name))
                for name in ALGORITHMS[operation]
            )
        return self.known[key]

    def _profile(self, axis: str, algorithm: str) -> LinkProfile:
        """The links of a group: a host's; or the network's, over the cards of all its ranks on a host.

        Where a host has several of its ranks, most hops of a ring are inside of one; all those of halving and
        doubling are reckoned as the network's.
        """
        stride, here = self.stride(axis), self.hardware.ranks_per_host
        if stride * self.size(axis) <= here:
            return self.crowd.links or self.hardware.inside
        size = self.size(axis)
        cards = max(1, min(size, here // stride))
        profile, inside = self.hardware.between, self.hardware.inside.links["messages"]
        link = profile.links["messages"]
        alpha = link.alpha
        if algorithm == "ring":
            crossed = -(-size // cards) - 1  # hops from host to host
            alpha = (crossed * link.alpha + (size - 1 - crossed) * inside.alpha) / (size - 1)
        together = replace(link, alpha=alpha, beta=max(link.beta / cards, inside.beta))
        return replace(profile, links={"messages": together})

    def message(self, bytes_: float, axis: str) -> float:
        """Seconds of a message to the next rank of the axis."""
        inside = self.stride(axis) * self.size(axis) <= self.hardware.ranks_per_host
        profile = (self.crowd.links or self.hardware.inside) if inside else self.hardware.between
        link = profile.links["messages"]
        busy = link.beta if link.busy_beta is None else link.busy_beta
        return link.alpha + busy * bytes_

    # Tensor parallelism: what a layer's passes send, for a stream of activations of so many bytes.

    def tensor_parallel(self, stream: float, vector: float) -> tuple[float, float]:
        """Seconds of what a block sends forward, and backward; `vector` are the bytes of a bias."""
        if self.layout.tp == 1:
            return 0.0, 0.0
        if not self.layout.sequence_parallel:
            each = self.collective("all_reduce", stream, "tp")
            return 2 * each, 2 * each
        gather, scatter = self._gather(stream), self.collective("reduce_scatter", stream, "tp")
        # Backward inputs are gathered again; two biases and two norms have a part of the gradient on each.
        bias, norm = (self.collective("all_reduce", many * vector, "tp") for many in (1, 2))
        return 2 * (gather + scatter), 2 * (2 * gather + scatter + bias + norm)

    def first_layer(self, stream: float, positions: float) -> tuple[float, float]:
        """Of the token table, which is cut by the vocabulary, and of so many bytes of positions."""
        if self.layout.tp == 1:
            return 0.0, 0.0
        if not self.layout.sequence_parallel:
            return self.collective("all_reduce", stream, "tp"), 0.0
        gathered = self._gather(stream) + self._gather(positions)
        return self.collective("reduce_scatter", stream, "tp"), gathered

    def last_layer(self, stream: float, vector: float, tokens: int) -> tuple[float, float]:
        """Of the norm, the scores and the loss, which gathers three numbers a token, in float32."""
        if self.layout.tp == 1:
            return 0.0, 0.0
        loss = self.collective("all_gather", 12.0 * tokens, "tp")
        if not self.layout.sequence_parallel:
            return loss, self.collective("all_reduce", stream, "tp")
        gather, scatter = self._gather(stream), self.collective("reduce_scatter", stream, "tp")
        return loss + gather, gather + scatter + self.collective("all_reduce", 2 * vector, "tp")

    def _gather(self, stream: float) -> float:
        return self.collective("all_gather", stream / self.layout.tp, "tp")

    # Context parallelism: keys and values go round; backward their gradients, in float32 at least, behind.

    def ring(self, keys: float, element: int) -> tuple[float, float]:
        """Seconds of a block's ring of attention forward and backward, for so many bytes of a rank's keys."""
        if self.layout.cp == 1:
            return 0.0, 0.0
        hops = self.layout.cp - 1
        forward = hops * self.message(2 * keys, "cp")
        return forward, forward + hops * self.message(2 * keys * max(element, 4) / element, "cp")


def _cost(operation: str, algorithm: str, bytes_: float, ranks: int, profile: LinkProfile) -> float:
    return predict(operation, "shared_memory" if profile.memory else algorithm, bytes_, ranks, profile)
