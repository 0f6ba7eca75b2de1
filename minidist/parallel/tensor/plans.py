"""Plans that cut all of this project's models, and the bytes that a pass through them sends.

A GPT: attention by heads, the MLP by its middle, the tables of tokens and of logits by the vocabulary. What
is left whole are the norms, the positions, and the biases that are added to sums. An MLP: pairs of layers.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3, figure 4: two all-reduces in a block's forward pass and
two in its backward pass.
"""

from __future__ import annotations

from torch import nn

from minidist.model.configs import TransformerConfig
from minidist.model.gpt import GPT
from minidist.model.mlp import MLP


def plan_for(model: nn.Module) -> dict[str, str]:
    """The plan for `parallelize` that cuts all of a GPT or an MLP.

    The outputs of a GPT, and of an MLP with an odd number of layers, are then each rank's part of the logits;
    see `vocabulary_of`.

    Raises:
        TypeError: for other models, which need a plan of their own.
    """
    if isinstance(model, GPT):
        return _gpt_plan(model)
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


def _gpt_plan(model: GPT) -> dict[str, str]:
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


def bytes_per_pass(
    config: TransformerConfig,
    rows: int,
    tokens: int,
    ranks: int,
    sequence_parallel: bool = False,
    element_size: int = 4,
) -> int:
    """Bytes that a rank sends in one forward and backward pass of a GPT cut by `plan_for`, and its loss.

    With S the bytes of the stream, rows x tokens x D: an all-reduce of S is 2 (n - 1) / n S. There are four
    in each block, two forward and two backward, one for the token table forward, one for the logits'
    input backward; and the loss gathers three numbers a token.

    Under sequence parallelism a reduce-scatter and an all-gather, (n - 1) / n S each, take the place of each,
    and every column-parallel layer gathers its input once more in the backward pass. The gradients of norms,
    of biases after sums, and of positions are joined too.

    rows: of this rank's micro-batch. tokens: T, in a row. element_size: bytes of an activation.
    """
    n, width = ranks, config.width
    stream = rows * tokens * width * element_size
    loss = (n - 1) * 3 * rows * tokens * max(element_size, 4)
    if not sequence_parallel:
        return (4 * config.layers + 2) * _all_reduce(stream, n) + loss
    # Entered by a gather, left by a scatter; the token table and the head are half of one each.
    regions = 2 * config.layers + 1
    exchanges = 5 * regions * ((n - 1) * stream // n)
    norms = regions * _all_reduce(2 * width * element_size, n)
    biases = 2 * config.layers * _all_reduce(width * element_size, n)
    positions = (n - 1) * (tokens * width * element_size // n)
    return exchanges + norms + biases + positions + loss


def _all_reduce(size: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size // ranks
