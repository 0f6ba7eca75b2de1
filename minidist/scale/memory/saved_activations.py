"""Bytes of activations: what a transformer's forward pass saves for its backward pass, term by term.

Shapes: b rows of t tokens, D width, H heads, V vocabulary; s bytes per element, m = max(s, 4) bytes where
sums are kept. One block of minidist's GPT, or of BERT, which has the same parts in another order, saves:

| What is saved | Bytes |
|---|---|
| input of attention's norm, its mean and deviation | s b t D + 2 s b t |
| output of that norm, which becomes queries, keys and values | s b t D |
| queries, keys, values | 3 s b t D |
| attention's output, which the output map reads | s b t D |
| fused attention: log of each softmax's sum | m b t H |
| input of the MLP's norm, its mean and deviation | s b t D + 2 s b t |
| output of that norm | s b t D |
| output of the first map, and of the GELU | 8 s b t D |

The sum is 16 s b t D and a little. With s = 2 this is the 34 b t D of Korthikanti et al., equation 1, less
two dropout masks of one byte: 32 b t D. Their other term, 5 H b t^2, belongs to attention that is not fused,
such as torch's on CPUs with dropout. It saves softmax, mask and their product in m bytes each (the paper's
2 + 1 + 2), and queries, keys and values in m bytes. On CPUs a mask takes s bytes per element.

The two ends save 8 t bytes of positions, and the last norm's input and output. The loss saves the log-softmax
(m b t V), 8 b t for targets and m for their number. The logits are not saved, but exist for a moment at the
same time. BERT's embedding has a norm; its masked-LM head a map and a GELU before the last norm; its pooler
saves the whole stream, although it reads only the first token, and b D of output.

With experts, the MLP's rows are the P = k b t pairs of a token and one of its k experts. They save the inner
width twice, as above, and more: 3 s P D for copies of tokens, for results and for these times their gates,
s P for the gates, and 16 P for the order of the pairs. The router saves its scores, s b t E, the gates with
their sums, s (P + b t), and which experts it chose, 8 P. Guests from other ranks are as many as the pairs if
all experts get as many tokens; they have gates, an order and results of their own.

Tensor parallelism (equation 2) leaves inputs and outputs of norms whole on each rank and divides the rest;
sequence parallelism (equation 4) divides these as well. The token table and the loss then also save which
tokens are this rank's: 9 b t, and b t. With context parallelism t counts this rank's tokens, and ring
attention keeps its output once more than fused attention. A part that is recomputed (section 5) keeps its
input, and one such part at a time everything: the peak is at the loss, or in one of the last layers.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4
and 5.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.parallel.contract.recompute_policies import WHOLE
from minidist.scale.memory.parameter_sizes import ALONE, ModelPart, block_maps

ATTENTIONS = ("fused", "math")


@dataclass(frozen=True)
class Saved:
    """Bytes that one micro-batch saves on one rank."""

    config: TransformerConfig
    rows: int
    tokens: int  # in a row, on this rank
    element: int  # bytes per element of the activations
    attention: str | None = None  # "fused" or "math"; None: torch's choice on a CPU, math with dropout
    part: ModelPart = ALONE
    sequence_parallel: bool = False  # norms work on a share of the tokens
    ring: bool = False  # context parallelism: ring attention

    @property
    def dropout(self) -> bool:
        """Whether the model drops activations."""
        return isinstance(self.config, GPTConfig) and self.config.dropout > 0

    @property
    def wide(self) -> int:
        """Bytes per element of values that are kept in float32 or wider."""
        return max(self.element, 4)

    @property
    def stream(self) -> int:
        """One tensor of the residual stream: s b t D, or this rank's share of it."""
        return self.element * self.rows * self._outside * self.config.width

    @property
    def statistics(self) -> int:
        """A norm's mean and deviation for each token."""
        return 2 * self.element * self.rows * self._outside

    @property
    def _outside(self) -> int:
        """Tokens that this rank has in the norms and residual sums."""
        return self.part.own(self.tokens) if self.sequence_parallel else self.tokens

    def layer(self, number: int, again: Collection[str]) -> tuple[int, int]:
        """Bytes that a layer saves between its passes, and the most in its backward pass.

        again: which of its parts are recomputed; see contract/recompute_policies.py.
        """
        last, gpt = self.config.layers + 1, isinstance(self.config, GPTConfig)
        whole = self.embedding() if number == 0 else self.head() if number == last else self.block()
        if WHOLE in again:  # which keeps its input; the first layer's is the batch
            return (self.stream if number else 0), whole
        if number in (0, last):
            return whole, whole
        inside = {"attention": self.inside_attention(), "mlp": self.inside_mlp()}
        kept = most = whole - sum(size for part, size in inside.items() if part in again)
        # When a part is recomputed, the backward pass has freed what comes after it in the block.
        if "mlp" in again:
            after = self.stream * self.dropout if gpt else self.stream + self.statistics
            most = max(most, kept - after + inside["mlp"])
        if "attention" in again:
            before = 2 * self.stream + self.statistics if gpt else self.stream
            most = max(most, before + inside["attention"])
        return kept, most

    def block(self) -> int:
        """Everything that one block saves, including its input."""
        outside = (4 + 2 * self.dropout) * self.stream + 2 * self.statistics
        return outside + self.inside_attention() + self.inside_mlp()

    def inside_attention(self) -> int:
        """What attention saves besides its input."""
        heads = self.rows * self.tokens * self.part.own(self.config.heads)
        (*_, output), _ = block_maps(self.config, self.part)
        attended = self.element * self.rows * self.tokens * output.inputs  # as large as the queries
        if (self.attention or ("math" if self.dropout else "fused")) == "fused":
            return (4 + self.ring) * attended + self.wide * heads
        saved = (1 + self.ring) * attended + 3 * attended * self.wide // self.element
        return saved + (3 if self.dropout else 1) * self.wide * heads * self.tokens

    def inside_mlp(self) -> int:
        """What the MLP saves besides its input: the first map's output, and the GELU's."""
        config, (_, (*_, up, down)) = self.config, block_maps(self.config, self.part)
        inner = up.outputs + down.inputs
        if not isinstance(config, GPTConfig) or not config.experts:
            return self.element * self.rows * self.tokens * inner
        tokens = self.rows * self._outside
        chosen, pairs = config.experts_per_token * tokens, config.rows_of_mlps(tokens)
        gates = chosen + tokens if config.experts_per_token > 1 else 0  # and their sums
        router = self.element * (tokens * config.experts + gates) + 16 * chosen  # their order, too
        limits = 0 if config.capacity is None else chosen  # bytes that say which experts are full
        # Copies of tokens, results, those times their gates; the maps; gates. Where the tokens come from.
        rows = self.element * (3 * config.width + inner + 1) + 8
        # Guests have gates and an order, too, and their results come back.
        shared = (self.element * (config.width + 1) + 8) * (self.part.ep > 1)
        return router + limits + pairs * (rows + shared)

    def embedding(self) -> int:
        """Bytes that the first layer saves, without the tokens, which the caller holds. BERT's has a norm."""
        ids = 8 * self.tokens + (9 * self.rows * self.tokens if self.part.tp > 1 else 0)
        if not isinstance(self.config, GPTConfig):
            return ids + self.stream + self.statistics
        return ids + (self.stream if self.dropout else 0)

    def head(self) -> int:
        """Bytes that the last layer saves. BERT's pooler reads a token per row and keeps the whole stream."""
        if not self.config.generates:
            return self.stream + self.stream // self.tokens
        mapped = 0 if isinstance(self.config, GPTConfig) else 2 * self.stream
        return 2 * self.stream + self.statistics + mapped

    def loss(self) -> int:
        """Bytes that the loss saves."""
        rest = self.rows * self.tokens if self.part.tp > 1 else self.wide
        return self.logits + 8 * self.rows * self.tokens + rest if self.logits else 0

    @property
    def logits(self) -> int:
        """A score of m bytes for each entry of the vocabulary; 0 for a model without a language head."""
        if not self.config.generates:
            return 0
        return self.wide * self.rows * self.tokens * self.part.own(self.config.vocabulary)

    @property
    def transient_logits(self) -> int:
        """Gradients that exist besides the log-softmax: its own; in half precision also the logits'."""
        return self.logits + (self.logits * self.element // self.wide if self.element < self.wide else 0)
