"""The work of each layer: operations of products, bytes that everything else moves, and operator calls.

A linear map of n tokens from K features to M takes 2 n K M operations forward, and twice that backward for
the gradients of its input and its weight. Attention multiplies queries by keys and weights by values: 4 d
operations for each query and each key that it sees, with heads of width d. A fused kernel has two products
forward and five backward. With experts an MLP has k rows for each token, and a rank its share of the weights;
all experts get as many rows. Everything else (norms, GELU, sums, copies) is bound by the bytes that it moves.

Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", appendix (operations of a transformer); Dao et al. 2022, "FlashAttention", appendix B (backward
pass of attention); Korthikanti et al. 2022, section 5 (recomputation).

Shapes: b rows, t tokens of this rank, D width, V vocabulary; S = b t D elements, one stream of activations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from minidist.model.configs import BERTConfig, GPTConfig, TransformerConfig
from minidist.parallel.contract.recompute_policies import WHOLE, recomputed_parts
from minidist.scale.memory.parameter_sizes import ALONE, LinearMap, ModelPart, block_maps

RING_CALLS, RING_TILE = 25, 512
"""Operators in a hop of ring attention, and the keys that it computes with at once."""
TRADE_CALLS, TRADED = 30, 32
"""Operators around Ulysses' two trades, and how often they read or write a stream of the rank's heads."""


Same = TypeVar("Same", bound="Amounts")


class Amounts:
    """A base for dataclasses whose fields are added and multiplied together."""

    def __add__(self: Same, other: Same) -> Same:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __sub__(self: Same, other: Same) -> Same:
        return self + other * -1

    def __mul__(self: Same, factor: float) -> Same:
        return type(self)(*(each * factor for each in vars(self).values()))


@dataclass(frozen=True)
class Computation(Amounts):
    """The work of a pass on one rank."""

    products: float = 0.0  # operations of matrix products
    attention: float = 0.0  # operations of attention's products, for the pairs that its mask leaves
    operands: float = 0.0  # bytes that the products read and write
    moved: float = 0.0  # bytes that everything else reads and writes
    calls: float = 0.0  # calls of operators

    @property
    def flops(self) -> float:
        """Operations of all products."""
        return self.products + self.attention


@dataclass(frozen=True)
class PassWork(Amounts):
    """The work of the passes of one or several layers."""

    forward: Computation = Computation()
    backward: Computation = Computation()
    again: Computation = Computation()  # the part of the forward pass that recomputation repeats


@dataclass(frozen=True)
class LayerWork:
    """The work of each kind of layer for one micro-batch on one rank.

    Recomputation stops once it has what the backward pass needs, so a layer's last product is not repeated.
    """

    config: TransformerConfig
    rows: int  # of the micro-batch
    tokens: int  # of each row, on this rank
    length: int  # tokens of the whole row; with context parallelism more than `tokens`
    element: int = 4  # bytes of an activation
    part: ModelPart = ALONE
    sequence_parallel: bool = False  # norms and sums work on a share of the tokens
    trading: int = 1  # ranks that trade tokens for heads; keys go around a ring of such groups

    @cached_property
    def stream(self) -> float:
        """Bytes of one whole stream of activations."""
        return self._bytes(self.config.width)

    @cached_property
    def outside(self) -> float:
        """Bytes of a stream in the norms and residual sums."""
        return self.stream / self.part.tp if self.sequence_parallel else self.stream

    @cached_property
    def pairs(self) -> float:
        """Pairs of a query and a key for which this rank computes; a causal mask leaves about half.

        A ring leaves out what the mask hides of the other ranks' keys, and of its own in whole tiles.
        """
        if not isinstance(self.config, GPTConfig):
            return float(self.rows * self.tokens * self.length)
        tile = min(self.length / self._ring, RING_TILE) if self._ring > 1 else 1
        return self.rows * self.tokens * (self.length + tile) / 2

    @cached_property
    def routed(self) -> int:
        """Tokens that this rank routes to experts: a share of its own with sequence parallelism."""
        return self.rows * (self.tokens // self.part.tp if self.sequence_parallel else self.tokens)

    @cached_property
    def mlp_rows(self) -> int:
        """Rows of a block's MLPs: one for each token, or for each pair of a token and an expert."""
        return self.config.rows_of_mlps(self.routed if self.config.experts else self.rows * self.tokens)

    def _linear(self, *maps: LinearMap, tokens: float | None = None) -> PassWork:
        """The work of linear maps, of so many tokens each; their backward pass does twice as much.

        Those in one tensor share the tokens.
        """
        count = self.rows * self.tokens if tokens is None else tokens
        products = sum(each.inputs * each.outputs for each in maps)
        elements = sum(count * (each.inputs + each.outputs) + each.weights for each in maps)
        calls = sum(max(1, each.without_bias) for each in maps)
        forward = Computation(2 * count * products, operands=self.element * elements, calls=calls)
        return PassWork(forward, forward * 2)

    @cached_property
    def _maps(self) -> tuple[list[LinearMap], list[LinearMap]]:
        return block_maps(self.config, self.part)

    @cached_property
    def _attended(self) -> Computation:
        """Attention without its maps."""
        own, calls = self._maps[0][-1].inputs, 1 + TRADE_CALLS * (self.trading > 1)
        calls += RING_CALLS * self._ring if self._ring > 1 else 0
        moved = TRADED * self._bytes(own) if self.trading > 1 else 0.0
        return Computation(0.0, 4 * self.pairs * own, 4 * self._bytes(own), moved, calls)

    @property
    def _ring(self) -> int:
        """How many groups of ranks keys go around."""
        return round(self.length / self.tokens / self.trading)

    def _bytes(self, features: int) -> float:
        """Bytes of so many features of each token."""
        return float(self.element * self.rows * self.tokens * features)

    @cached_property
    def _scores(self) -> float:
        """Bytes of the scores that ring attention writes, which is not fused; 0 for fused attention."""
        return 4 * self.pairs * self.part.own(self.config.heads) if self._ring > 1 else 0.0

    @cached_property
    def _attention(self) -> Computation:
        """Attention's forward pass without its last map: what it repeats if it is recomputed."""
        *into, output = self._maps[0]
        rest = Computation(moved=2 * self._bytes(output.inputs) + 5 * self._scores, calls=9)
        return self._linear(*into).forward + self._attended + rest

    @cached_property
    def mlp(self) -> PassWork:
        """The MLP, or the router and this rank's experts; the GELU reads and writes the inner width.

        Experts copy the rows of tokens, join their results, weight them and add them up, and all of that once
        more for guests from other ranks. Their gradients are joined to one for each tensor.
        """
        *router, up, down = self._maps[1]
        inner = float(self.element * self.mlp_rows * down.inputs)
        last = self._linear(down, tokens=self.mlp_rows)
        gelu = PassWork(Computation(moved=2 * inner, calls=1), Computation(moved=4 * inner))
        work = self._linear(up, tokens=self.mlp_rows) + last + gelu
        if not router:
            return replace(work, again=work.forward - last.forward)
        own, ways = up.without_bias, 1 + (self.part.ep > 1)
        rows, scores = self.mlp_rows * self.config.width, self.routed * self.config.experts
        around = Computation(moved=self.element * (10.0 * ways * rows + 6 * scores), calls=own + 20 * ways)
        joined = Computation(moved=2.0 * self.element * self.expert_elements, calls=own)
        work += self._linear(*router, tokens=self.routed) + PassWork(around, around + joined)
        return replace(work, again=work.forward)  # the gates need the results

    @cached_property
    def expert_elements(self) -> int:
        """Elements of a block's router and of this rank's experts."""
        return sum(each.weights for each in self._maps[1]) if self.config.experts else 0

    @cached_property
    def block(self) -> PassWork:
        """Two norms, attention with its four maps, the MLP, two residual sums."""
        *_, output = self._maps[0]
        # Norms 4 S, residual sums 6 S.
        rest = Computation(moved=10 * self.outside, calls=8)
        forward = self._attention + self._linear(output).forward + self.mlp.forward + rest
        backward = self._linear(*self._maps[0]).backward + self.mlp.backward + self._attended * 2.5
        # Norms 8 S, residual gradients 6 S, sum of those of queries, keys and values 6 S, biases 2 S.
        moved = 22 * self.outside + 11 * self._bytes(output.inputs) + 6 * self._scores
        backward += Computation(moved=moved, calls=26)
        return PassWork(forward, backward, forward - self.mlp.forward + self.mlp.again)

    @cached_property
    def embedding(self) -> PassWork:
        """Look up tokens and positions and add them; BERT adds segments and a norm."""
        more = isinstance(self.config, BERTConfig)
        table = self.element * (self.part.own(self.config.vocabulary) + self.config.context)
        forward = Computation(moved=(5 + 5 * more) * self.outside, calls=6 + 3 * more)
        backward = Computation(
            moved=(4 + 5 * more) * self.outside + table * self.config.width, calls=6 + 3 * more
        )
        return PassWork(forward, backward, forward)

    @cached_property
    def head(self) -> PassWork:
        """The last norm, a score for each entry of the vocabulary, and the loss; or BERT's pooler."""
        config = self.config
        square = LinearMap(config.width, config.width)
        if not config.generates:
            pooler = self._linear(square, tokens=self.rows)
            rest = PassWork(Computation(calls=2), Computation(moved=2 * self.outside, calls=4))
            return replace(pooler + rest, again=rest.forward)
        own, wide = self.part.own(config.vocabulary), max(self.element, 4)
        logits = wide * self.rows * self.tokens * own
        scores = self._linear(LinearMap(config.width, own))
        maps = [square] if isinstance(config, BERTConfig) else []
        work = self._linear(*maps)
        forward = work.forward + Computation(moved=(2 + 4 * len(maps)) * self.outside, calls=3)
        backward = work.backward + Computation(moved=(4 + 8 * len(maps)) * self.outside, calls=4)
        cast = logits * (1 + self.element / wide) if self.element < wide else 0.0
        loss = Computation(moved=2 * logits + cast, calls=6)
        return PassWork(
            forward + scores.forward + loss,
            backward + scores.backward + Computation(moved=3 * logits + cast, calls=6),
            forward,  # the scores are the layer's last product, and the loss is not part of it
        )

    def again(self, numbers: range, recompute: bool | str) -> Computation:
        """What the backward pass of consecutive layers computes again, under a policy of recomputation."""
        last, parts = self.config.layers + 1, recomputed_parts(recompute, self.config.layers)
        kinds = Counter((i == 0, i == last, part) for i in numbers for part in parts[i])
        found = Computation()
        for (first, is_last, part), count in kinds.items():
            layer = self.embedding if first else self.head if is_last else self.block
            known = {WHOLE: layer.again, "attention": self._attention, "mlp": self.mlp.again}
            found += known.get(part, Computation()) * count
        return found

    def layers(self, numbers: range) -> PassWork:
        """The work of consecutive layers; layer 0 is the embedding and the last one the head."""
        last = self.config.layers + 1
        blocks = len([i for i in numbers if 1 <= i < last])
        found = self.block * blocks
        if 0 in numbers:
            found += self.embedding
        return found + self.head if last in numbers else found


@lru_cache(maxsize=256)
def model_flops(config: TransformerConfig, rows: int, tokens: int) -> float:
    """Operations of a step on all ranks: forward and backward, without recomputation."""
    whole = LayerWork(config, rows, tokens, tokens).layers(range(config.layers + 2))
    return (whole.forward + whole.backward).flops
