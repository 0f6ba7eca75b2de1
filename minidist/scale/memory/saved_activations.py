"""Activations: what a transformer's forward pass saves for its backward pass, term by term.

Shapes: b rows, t tokens in each, D width, H heads, V vocabulary; s bytes of an element, m = max(s, 4), in
which sums are held. For one block of minidist's GPT, and of BERT, which has the same parts in another order:

| What is saved | Bytes |
|---|---|
| input of the attention's norm, and its mean and deviation | s b t D + 2 s b t |
| its output, from which queries, keys and values are made | s b t D |
| queries, keys, values | 3 s b t D |
| the attention's output, which the output map reads too | s b t D |
| fused attention: the log of each softmax's sum | m b t H |
| input of the MLP's norm, and its mean and deviation | s b t D + 2 s b t |
| its output, which the first map reads | s b t D |
| the first map's output, which the GELU reads; the GELU's, which the second map reads | 8 s b t D |

In all 16 s b t D, and a little. With s = 2 that is the 34 b t D of Korthikanti et al., equation 1, without
the two dropout masks of one byte: 32 b t D. Their other term, 5 H b t^2, is what attention saves that is not
fused, as torch's is on CPUs where it drops out: softmax, mask and the product of both, in m bytes each (their
2 + 1 + 2), as well as queries, keys and values in m bytes. A mask takes s bytes an element on CPUs.

The two ends: 8 t bytes for the positions, the last norm's input and output, and of the loss the log-softmax,
m b t V, with 8 b t for targets and m for their number. The logits are not saved; they live for a moment
beside it. BERT's embedding has a norm, its masked-LM head a map and a GELU before the last norm; its pooler
saves the whole stream, though it reads the first token, and gives b D.

With tensor parallelism (Korthikanti et al., equation 2) norms' inputs and outputs are whole on each rank and
the rest is divided; with sequence parallelism (equation 4) these are too. The token table and the loss then
save which tokens are this rank's: 9 b t, and b t more. With context parallelism t are this rank's tokens, and
ring attention keeps its output once more than fused attention. With recomputation (section 5) each layer
keeps its input, and one at a time all; the peak is at the loss or, the last layer done, in the last block.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4
and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.scale.memory.parameter_sizes import ALONE, ModelPart

ATTENTIONS = ("fused", "math")


@dataclass(frozen=True)
class Saved:
    """Saves of a micro-batch of `rows` rows of `tokens` tokens, in bytes.

    tokens: of this rank, with context parallelism.
    element: bytes of an element of the activations.
    attention: "fused" or "math"; None for what torch takes on a CPU: math where the model drops out.
    place: whose part of the matrices.
    sequence_parallel: whether norms are on a share of the tokens.
    ring: whether attention goes round a ring, with context parallelism.
    """

    config: TransformerConfig
    rows: int
    tokens: int
    element: int
    attention: str | None = None
    place: ModelPart = ALONE
    sequence_parallel: bool = False
    ring: bool = False

    @property
    def dropout(self) -> bool:
        """Whether the model drops activations."""
        return isinstance(self.config, GPTConfig) and self.config.dropout > 0

    @property
    def wide(self) -> int:
        """Bytes of an element of what is held in float32 at least."""
        return max(self.element, 4)

    @property
    def stream(self) -> int:
        """One tensor of the residual stream's size: s b t D, or this rank's share of it."""
        return self.element * self.rows * self._outside * self.config.width

    @property
    def statistics(self) -> int:
        """A norm's mean and deviation for each token."""
        return 2 * self.element * self.rows * self._outside

    @property
    def _outside(self) -> int:
        """Tokens outside of the parts that are cut."""
        return self.place.part(self.tokens) if self.sequence_parallel else self.tokens

    def block(self) -> int:
        """All that one block saves, its input included."""
        config, tokens = self.config, self.rows * self.tokens
        outside = (4 + 2 * self.dropout) * self.stream + 2 * self.statistics
        heads = tokens * self.place.part(config.heads)
        attended = self.element * heads * config.head_size  # of queries' size
        inside = (1 + self.ring) * attended + 2 * self.element * tokens * self.place.part(4 * config.width)
        if (self.attention or ("math" if self.dropout else "fused")) == "fused":
            return outside + inside + 3 * attended + self.wide * heads
        inside += 3 * attended * self.wide // self.element
        return outside + inside + (3 if self.dropout else 1) * self.wide * heads * self.tokens

    def embedding(self) -> int:
        """What the first layer saves; the tokens are the caller's. BERT's has a norm."""
        ids = 8 * self.tokens + (9 * self.rows * self.tokens if self.place.tp > 1 else 0)
        if not isinstance(self.config, GPTConfig):
            return ids + self.stream + self.statistics
        return ids + (self.stream if self.dropout else 0)

    def head(self) -> int:
        """What the last layer saves. BERT's pooler reads one token of each row, of which the rest stays."""
        if not self.config.generates:
            return self.stream + self.stream // self.tokens
        mapped = 0 if isinstance(self.config, GPTConfig) else 2 * self.stream
        return 2 * self.stream + self.statistics + mapped

    def loss(self) -> int:
        """What the loss saves."""
        rest = self.rows * self.tokens if self.place.tp > 1 else self.wide
        return self.logits + 8 * self.rows * self.tokens + rest if self.logits else 0

    @property
    def logits(self) -> int:
        """Scores in m bytes for each token of the vocabulary, where there are any."""
        if not self.config.generates:
            return 0
        return self.wide * self.rows * self.tokens * self.place.part(self.config.vocabulary)

    @property
    def transient_logits(self) -> int:
        """Beside the log-softmax: its gradient, and in half precision the logits', which is made from it."""
        return self.logits + (self.logits * self.element // self.wide if self.element < self.wide else 0)
