"""Plans that cut a model.

In a GPT, attention is cut by heads, the MLP by its hidden features, the tables of tokens and logits by the
vocabulary; norms, positions, and biases that are added to sums stay whole. In an MLP, pairs of layers are
cut.

Other models are searched for pairs of linear layers with well-known names (`ATTENTION`, `FEED_FORWARD`) whose
sizes fit each other, and for the plan that many models of transformers bring (`tp_plan`). Names are a guess:
an engine's first step compares the cut model with the uncut one.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3, figure 4: a block has two all-reduces in the forward
pass and two in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from minidist._names import fits
from minidist.parallel.tensor_parallel.cuts import base_of
from minidist.parallel.tensor_parallel.linear_layers import linear_sizes
from minidist.parallel.tensor_parallel.styles import alternatives

ATTENTION = (
    ("q_proj|k_proj|v_proj", "o_proj"),  # Llama, Mistral, Qwen, ViT
    ("q_proj|k_proj|v_proj", "out_proj"),  # OPT, BART, CLIP
    ("attention.self.query|key|value", "attention.output.dense"),  # BERT
    ("c_attn", "c_proj"),  # GPT-2, nanoGPT
    ("qkv", "proj"),  # timm
)
"""The layers that read attention's input, joined by |, and the layer that reads the heads' results."""
FEED_FORWARD = (
    ("gate_proj|up_proj", "down_proj"),
    ("intermediate.dense", "output.dense"),
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("linear1", "linear2"),  # torch's encoder layers
)
BY_TRANSFORMERS = {
    "colwise": "column",
    "colwise_gather_output": "column_gathered",
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "per_head",
}
"""Our names for styles in the plans that models of transformers bring; parts with other styles stay whole."""
ELEMENTWISE_MODULES = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.Dropout,
    nn.Identity,
)


def plan_for(model: nn.Module) -> dict[str, str]:
    """Return a plan for `parallelize` that cuts `model`, which is whole; TypeError if none is found.

    The outputs of a GPT, and of an MLP with an odd number of layers, are then each rank's part of the logits;
    see `vocabulary_of`. Other models return all logits on every rank.
    """
    if plan := plan_of_ours(model) or _found(model):
        return plan
    raise TypeError(
        f"no plan is known for a {type(model).__name__}; give one, such as "
        'plan={"layers.*.fc1": "column", "layers.*.fc2": "row"}, or use another axis: tp cuts pairs of '
        "Linear layers, as in attention and MLPs, and no convolutions"
    )


def plan_of_ours(model: nn.Module) -> dict[str, str]:
    """Return the plan of a GPT, a BERT or an MLP of this project; empty for another model."""
    # Imported here, because most users bring a model of their own.
    from minidist.model.bert import BERT
    from minidist.model.gpt import GPT
    from minidist.model.mlp import MLP

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
        if getattr(model.config, "experts", 0):  # ep shares them, and every tensor-parallel rank has a copy
            del plan["layers.*.mlp.up"], plan["layers.*.mlp.down"]
            plan["layers.*.mlp"] = "sequence"
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
    return {}


def _found(model: nn.Module) -> dict[str, str]:
    """The plan of a model that is not this project's; empty if it has no pair of layers to cut."""
    modules = dict(model.named_modules())
    theirs = dict(_by_transformers(modules))
    plan: dict[str, str] = {}
    cut: set[str] = set()
    for name, part in modules.items():
        prefix = f"{name}." if name else ""
        for pair in (*_pairs(part), *_in_sequence(part)):
            styles = {f"{prefix}{each}".rstrip("."): style for each, style in pair.items() if prefix or each}
            names = {each for pattern in styles for each in alternatives(pattern)}
            # Where transformers gathers the features, as for a norm over them, a pair would be wrong.
            if not names & cut and all(theirs.get(n, "column") in ("column", "row") for n in names):
                plan |= styles
                cut |= names
    plan |= {name: style for name, style in theirs.items() if name not in cut}
    plan |= {name: style for name, style in _vocabulary(modules) if plan and name not in plan}
    return plan


def _by_transformers(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Return styles from the plans that models of transformers bring, where they fit.

    `_vocabulary` looks after tied parameters.
    """
    holders: Counter[Tensor | None] = Counter(part._parameters.get("weight") for part in modules.values())
    for above, part in modules.items():
        hints = getattr(part, "tp_plan", None)
        for pattern, hint in hints.items() if isinstance(hints, Mapping) else ():
            style = BY_TRANSFORMERS.get(hint)
            for name, inner in modules.items() if style else ():
                kind = nn.Embedding if style == "vocabulary" else nn.Linear
                inner = base_of(inner)
                fitting = style == "per_head" or (type(inner) is kind and holders[inner.weight] == 1)
                if fitting and fits(name, f"{above}.{pattern}" if above else pattern):
                    yield name, str(style)


def _pairs(part: nn.Module) -> Iterator[dict[str, str]]:
    """Return styles, by name below `part`, for pairs of layers in it whose names and sizes fit."""
    for first, second in (*ATTENTION, *FEED_FORWARD):
        try:
            sizes = [linear_sizes(base_of(part.get_submodule(name))) for name in alternatives(first)]
            inputs, _ = linear_sizes(base_of(part.get_submodule(second)))
        except (AttributeError, TypeError):
            continue
        packed, rest = divmod(sizes[0][1], inputs)
        if rest or (packed > 1 and len(sizes) > 1):
            continue
        pair = {first: "column" if packed == 1 else f"column_packed={packed}", second: "row"}
        if (first, second) in ATTENTION:
            pair[first.rpartition(".")[0]] = "attention"
        yield pair


def _in_sequence(part: nn.Module) -> Iterator[dict[str, str]]:
    """Return styles for pairs of Linear layers in a Sequential with only elementwise functions between."""
    first = None
    for name, child in part.named_children() if isinstance(part, nn.Sequential) else ():
        if type(base_of(child)) is nn.Linear:
            if first is not None:
                yield {first: "column", name: "row"}
            first = name if first is None else None
        elif not isinstance(child, ELEMENTWISE_MODULES):
            first = None


def _vocabulary(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """The styles of the token table and of the layer of the logits, as a model of transformers names them.

    A table that is used in other places as well stays whole.
    """
    found = set()
    for part in modules.values():
        for ask in ("get_input_embeddings", "get_output_embeddings"):
            try:
                found.add(getattr(part, ask)())
            except (AttributeError, NotImplementedError):
                continue
    found = {part for part in found if type(part) in (nn.Embedding, nn.Linear)}
    elsewhere = {part._parameters.get("weight") for part in modules.values() if part not in found}
    for name, part in modules.items():
        if part in found and part.weight not in elsewhere:
            yield name, "vocabulary" if isinstance(part, nn.Embedding) else "column_gathered"
