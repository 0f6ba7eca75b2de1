"""The parameters of a transformer as a rank has them: how many elements each, layer by layer.

A pipeline cuts the chain of layers; tensor parallelism cuts matrices inside each layer.

Source of the cuts: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism", section 3: queries, keys, values and the MLP's first matrix by columns, with their biases;
the two projections onto the residual stream by rows, their biases whole; embeddings by vocabulary.
"""

from __future__ import annotations

from minidist.model.configs import BERTConfig, GPTConfig, TransformerConfig

Sizes = list[int]
"""Elements of each parameter of a layer, in the order in which they are registered."""


def share(count: int, ranks: int, rank: int = 0) -> int:
    """How many of `count` a rank has where they are dealt as evenly as can be, rank 0 at least as many."""
    return (count + ranks - 1 - rank) // ranks


def layers(config: TransformerConfig, tp: int = 1, pp: int = 1, stage: int = 0) -> list[Sizes]:
    """The layers of a pipeline's stage: the embeddings first, then blocks, then the head.

    Blocks are dealt to the stages as evenly as can be. Where the output matrix is tied and the two ends lie
    on different stages, the last has a copy.
    """
    first, last = stage == 0, stage == pp - 1
    found = [block(config, tp)] * share(config.layers, pp, stage)
    if first:
        found = [embeddings(config, tp), *found]
    if last:
        found = [*found, head(config, tp, owns_matrix=not first)]
    return found


def units(config: TransformerConfig, tp: int = 1, pp: int = 1, stage: int = 0) -> list[int]:
    """Elements of what is gathered together in ZeRO's stage 3: the root unit first, then each layer.

    The root has what several layers share, the tied matrix, where a stage has both its ends.
    """
    found = [sum(layer) for layer in layers(config, tp, pp, stage)]
    tied = config.shares_matrix and pp == 1
    root = embeddings(config, tp)[0] if tied else 0
    return [root, found[0] - root, *found[1:]]


def embeddings(config: TransformerConfig, tp: int) -> Sizes:
    """Tokens, positions; for BERT segments and a norm, too."""
    width = config.width
    tables = [share(config.vocabulary, tp) * width, config.context * width]
    return [*tables, config.segments * width, width, width] if isinstance(config, BERTConfig) else tables


def block(config: TransformerConfig, tp: int) -> Sizes:
    """A norm, four maps of attention, a norm, two maps of the MLP: weight and bias each."""
    width = config.width
    columns = [width * width // tp, width // tp]
    norm, rows = [width, width], [width * width // tp, width]
    up, down = [4 * width * width // tp, 4 * width // tp], [4 * width * width // tp, width]
    return [*norm, *columns * 3, *rows, *norm, *up, *down]


def head(config: TransformerConfig, tp: int, owns_matrix: bool = False) -> Sizes:
    """GPT's last norm, and its output matrix unless that is the token embedding; BERT's pooler.

    A masked-LM head is a map and a norm, the tied matrix, and a bias.
    """
    width, vocabulary = config.width, share(config.vocabulary, tp)
    pooler = [] if isinstance(config, GPTConfig) else [width * width, width]
    if not config.generates:
        return pooler
    matrix = [vocabulary * width] if owns_matrix or not config.shares_matrix else []
    return [*pooler, width, width, *matrix, *([vocabulary] if pooler else [])]
