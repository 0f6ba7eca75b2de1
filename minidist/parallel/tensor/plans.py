"""Plans that cut this project's models, and the bytes that one pass through such a model sends.

In a GPT, attention is cut by heads, the MLP by its hidden features, the tables of tokens and logits by the
vocabulary; norms, positions, and biases that are added to sums stay whole. In an MLP, pairs of layers are
cut.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3, figure 4: a block has two all-reduces in the forward
pass and two in the backward pass.
"""

from __future__ import annotations

from torch import nn

from minidist.model.bert import BERT
from minidist.model.configs import TransformerConfig
from minidist.model.gpt import GPT
from minidist.model.mlp import MLP
from minidist.parallel.compression.compressor import all_reduce_bytes


def plan_for(model: nn.Module) -> dict[str, str]:
    """Return the plan for `parallelize` that cuts a whole GPT, BERT or MLP; other models raise TypeError.

    The outputs of a GPT, and of an MLP with an odd number of layers, are then each rank's part of the logits;
    see `vocabulary_of`.
    """
    if isinstance(model, GPT):
        head = f"layers.{len(model.layers) - 1}"
        plan = {
            "layers.0.token": "vocabulary",
            "layers.0.position": "split",
            "layers.*.attention_norm": "sequence",
            "layers.*.attention.query|key|value": "column",
            "layers.*.attention.output": "row",
            "layers.*.mlp_norm": "sequence",
            "layers.*.mlp.up": "column",
            "layers.*.mlp.down": "row",
            f"{head}.norm": "sequence",
            f"{head}.output": "vocabulary",
        }
        if getattr(model.config, "dropout", 0.0):
            plan |= {"layers.*.attention": "random", "layers.*.dropout": "sequence"}
        return plan
    if isinstance(model, BERT):
        plan = {
            "layers.0.token": "vocabulary",
            "layers.*.attention.query|key|value": "column",
            "layers.*.attention.output": "row",
            "layers.*.mlp.up": "column",
            "layers.*.mlp.down": "row",
        }
        if model.config.generates:
            plan[f"layers.{len(model.layers) - 1}.scores"] = "vocabulary"
        return plan
    if isinstance(model, MLP):
        count = len(model.layers)
        styles = ["row" if index % 2 else "column" for index in range(count)]
        if count % 2:
            styles[-1] = "vocabulary"
        return {f"layers.{index}.linear": style for index, style in enumerate(styles)}
    raise TypeError(
        f"no plan is known for a {type(model).__name__}; give one, such as "
        'plan={"layers.*.fc1": "column", "layers.*.fc2": "row"}'
    )


def bytes_per_pass(
    config: TransformerConfig,
    rows: int,
    tokens: int,
    ranks: int,
    sequence_parallel: bool = False,
    element_size: int = 4,
) -> int:
    """Return the bytes that a rank sends in one forward and backward pass of a GPT cut by `plan_for`.

    The stream has rows x tokens x D elements, S bytes; an all-reduce of it sends 2 (n - 1) / n S. Each block
    has four, two forward and two backward; the token table has one forward, the input of the logits one
    backward; and the loss gathers three numbers a token.

    Under sequence parallelism a reduce-scatter and an all-gather, (n - 1) / n S each, replace each
    all-reduce, every column-parallel layer gathers its input once more in the backward pass, and the
    gradients of norms, of biases after sums, and of positions are combined.

    rows: of this rank's micro-batch. tokens: T, in a row. element_size: bytes of an activation.
    """
    n, width = ranks, config.width
    stream = rows * tokens * width * element_size
    loss = (n - 1) * 3 * rows * tokens * max(element_size, 4)
    if not sequence_parallel:
        return (4 * config.layers + 2) * all_reduce_bytes(stream, n) + loss
    # A gather enters a region and a scatter leaves it; the token table and the head are half a region each.
    regions = 2 * config.layers + 1
    exchanges = 5 * regions * ((n - 1) * stream // n)
    norms = regions * all_reduce_bytes(2 * width * element_size, n)
    biases = 2 * config.layers * all_reduce_bytes(width * element_size, n)
    positions = (n - 1) * (tokens * width * element_size // n)
    return exchanges + norms + biases + positions + loss
