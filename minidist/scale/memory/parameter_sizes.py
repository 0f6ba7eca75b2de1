"""The parameters of a transformer as a rank has them: how many elements each, layer by layer.

A pipeline cuts the chain of layers; tensor parallelism cuts matrices inside each layer.

Source of the cuts: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism", section 3: queries, keys, values and the MLP's first matrix by columns, with their biases;
the two projections onto the residual stream by rows, their biases whole; embeddings by vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from minidist.model.configs import BERTConfig, GPTConfig, TransformerConfig
from minidist.parallel.pipeline.layer_by_layer import cut
from minidist.parallel.tensor.cuts import share_of

Sizes = list[int]
"""Elements of each parameter of a layer, in the order in which they are registered."""


def share(count: int, ranks: int, rank: int = 0) -> int:
    """How many of `count` a rank has where they are dealt as evenly as can be, rank 0 at least as many."""
    return (count + ranks - 1 - rank) // ranks


@dataclass(frozen=True)
class ModelPart:
    """A rank's place among those that share a model's layers and matrices."""

    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline ranks
    chunks: int = 1  # parts of the model on each of these
    tp_rank: int = 0
    stage: int = 0

    def part(self, count: int) -> int:
        """Of `count` heads, columns or tokens of the vocabulary, those of this tensor-parallel rank."""
        return len(share_of(count, self.tp_rank, self.tp))


ALONE = ModelPart()


@lru_cache(maxsize=256)
def parts(config: TransformerConfig, pp: int, chunks: int) -> list[range]:
    """Which layers, the embeddings 0 and the head the last, are each part of a pipeline's model.

    Part i is on stage i % pp. Parts are as even in parameters as can be; see `layerwise.cut`.
    """
    block_size, whole = sum(block(config)), [sum(embeddings(config))]
    whole += [block_size] * config.layers + [sum(head(config, owns_matrix=True))]
    layers = [nn.Identity() for _ in whole]  # whose weights are given
    return cut(layers, pp * chunks, weights=whole)


def layers(config: TransformerConfig, place: ModelPart = ALONE) -> list[Sizes]:
    """The layers of a pipeline's stage: the embeddings first, then blocks, then the head.

    Where the output matrix is tied and the two ends lie on different stages, the last has a copy.
    """
    found, last = [], config.layers + 1
    own = [i for part in parts(config, place.pp, place.chunks)[place.stage :: place.pp] for i in part]
    for i in own:
        if i == 0:
            found.append(embeddings(config, place))
        else:
            found.append(block(config, place) if i < last else head(config, place, 0 not in own))
    return found


def units(config: TransformerConfig, place: ModelPart = ALONE) -> list[int]:
    """Elements of what is gathered together in ZeRO's stage 3: the root unit first, then each layer.

    The root has what several layers share, the tied matrix, where a stage has both its ends.
    """
    found = [sum(layer) for layer in layers(config, place)]
    tied = config.shares_matrix and place.pp == 1
    root = embeddings(config, place)[0] if tied else 0
    return [root, found[0] - root, *found[1:]]


def embeddings(config: TransformerConfig, place: ModelPart = ALONE) -> Sizes:
    """Tokens, positions; for BERT segments and a norm, too."""
    width = config.width
    tables = [place.part(config.vocabulary) * width, config.context * width]
    return [*tables, config.segments * width, width, width] if isinstance(config, BERTConfig) else tables


def block(config: TransformerConfig, place: ModelPart = ALONE) -> Sizes:
    """A norm, four maps of attention, a norm, two maps of the MLP: weight and bias each."""
    width, own = config.width, place.part(config.heads) * config.head_size
    middle = place.part(4 * width)
    columns = [width * own, own]
    norm, rows = [width, width], [width * own, width]
    up, down = [width * middle, middle], [width * middle, width]
    return [*norm, *columns * 3, *rows, *norm, *up, *down]


def head(config: TransformerConfig, place: ModelPart = ALONE, owns_matrix: bool = False) -> Sizes:
    """GPT's last norm, and its output matrix unless that is the token embedding; BERT's pooler.

    A masked-LM head is a map and a norm, the tied matrix, and a bias.
    """
    width, vocabulary = config.width, place.part(config.vocabulary)
    pooler = [] if isinstance(config, GPTConfig) else [width * width, width]
    if not config.generates:
        return pooler
    matrix = [vocabulary * width] if owns_matrix or not config.shares_matrix else []
    return [*pooler, width, width, *matrix, *([vocabulary] if pooler else [])]
