"""Experts on several ranks: results and each gradient equal one process, and bytes the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist import comm
from minidist.model import GPT, GPTConfig
from minidist.model.mixture_of_experts import MixtureOfExperts
from minidist.parallel.experts import expert_parallel
from minidist.parallel.experts.expert_parallel import experts_of, share_experts
from minidist.parallel.experts.load_balance import balance_experts, balanced_routers
from minidist.parallel.training.precision import Precision
from tests.conftest import Clusters
from tests.helpers.contract import instead_of, with_fault
from tests.helpers.refusals import refused_on_ranks

TINY = GPTConfig(vocabulary=11, context=8, layers=2, heads=2, width=8, experts=4)
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
Gradients = dict[str, Tensor]


def layer(skew: float = 0.0, **options: Any) -> MixtureOfExperts:
    """A layer in float64; `skew` sends every token to the first experts."""
    torch.manual_seed(5)
    made = MixtureOfExperts(replace(TINY, **options)).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    made.router.bias += skew * torch.arange(4, 0, -1)
    return made


def tokens(rows: int) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def run(made: nn.Module, own: Tensor) -> tuple[Tensor, Gradients, Tensor]:
    x = own.requires_grad_()
    result = made(x)
    (result * torch.linspace(1, 2, 8)).sum().backward()
    assert x.grad is not None
    return result.detach(), {n: p.grad for n, p in made.named_parameters() if p.grad is not None}, x.grad


def on_ranks(rows: Sequence[int], **options: Any) -> tuple[Tensor, Gradients, Tensor, int]:
    """What this rank's rows give: results, gradients as the strategy would sum them, bytes sent."""
    made = layer(**options)
    kept = share_experts(made).keys()
    first = sum(rows[: md.rank()])
    with comm.ledger() as ledger:
        result, gradients, at_inputs = run(made, tokens(sum(rows))[first : first + rows[md.rank()]])
    for name, parameter in made.named_parameters():
        if name not in kept:
            gradients[name] = comm.all_reduce(gradients.get(name, torch.zeros_like(parameter)))
        elif name not in gradients:
            gradients[name] = torch.zeros_like(parameter)
    return result, gradients, at_inputs, ledger.bytes_sent


def differing(rows: Sequence[int], found: Any, **options: Any) -> list[str]:
    """What differs from one process: the results, the gradients at the inputs, or a parameter's gradient."""
    result, gradients, at_inputs = run(layer(**options), tokens(sum(rows)))
    pairs = {"results": (torch.cat([each[0] for each in found]), result)}
    pairs["inputs"] = torch.cat([each[2] for each in found]), at_inputs
    for name, whole in gradients.items():
        parts = [each[1][name] for each in found]
        pairs[name] = (torch.cat(parts) if "experts." in name else parts[0]), whole
    return [name for name, (own, whole) in pairs.items() if not torch.allclose(own, whole, **CLOSE)]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ((6, 6), {}),
        ((5, 0), {}),  # a rank without tokens
        ((3, 4), {"skew": 10.0, "experts_per_token": 1}),  # one expert for all
        ((2, 5), {"skew": 10.0}),
        ((4, 3, 0, 1), {"experts_per_token": 3}),
        ((4, 1), {"experts_per_token": 4}),  # every expert for every token
    ],
)
def test_ranks_equal_one_process(
    rows: tuple[int, ...], options: dict[str, Any], cluster_of: Clusters
) -> None:
    assert not differing(rows, cluster_of(len(rows)).run(on_ranks, rows, **options), **options)


@instead_of(expert_parallel, "_forward")
def with_gates_that_learn_nothing(forward: Any, *given: Any) -> Any:
    """A fault with the right loss: the gates' gradient is lost, so the router learns nothing."""
    return forward(*given[:-1], given[-1].detach() + 0 * given[-1])


def test_a_router_that_learns_nothing_is_seen(cluster_of: Clusters) -> None:
    found = cluster_of(2).run(with_fault, with_gates_that_learn_nothing, on_ranks, (6, 6))
    assert differing((6, 6), found) == ["inputs", "router.weight"]


def sent(rows: int) -> tuple[int, int]:
    """Bytes that this rank sends for a layer whose tokens take the experts in turns, and for the counts."""
    made = layer(experts_per_token=2)
    share_experts(made)
    chosen = torch.arange(2 * rows).view(rows, 2) % 4
    x, gates = tokens(rows).requires_grad_(), torch.full((rows, 2), 0.5, dtype=torch.float64)
    with comm.ledger() as ledger:
        made.experts(x, chosen, gates).sum().backward()
    return ledger.bytes_sent, 8 * (4 - 4 // md.size())


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula(ranks: int, cluster_of: Clusters) -> None:
    for each, counts in cluster_of(ranks).run(sent, 12):
        assert each - counts == 4 * (ranks - 1) * 2 * 12 * 8 * 8 // ranks


def balanced(checkpointed: bool) -> tuple[Tensor, Tensor]:
    """Counts and biases after a step of two micro-batches on this rank's rows, and an evaluation."""
    made = layer(balance_rate=0.125)
    share_experts(made)
    own = tokens(8)[md.rank() :: md.size()]
    for part in own.split(2):
        x = part.clone().requires_grad_()
        result = checkpoint(made, x, use_reentrant=False) if checkpointed else made(x)
        result.square().sum().backward()
    with torch.no_grad():
        made(own)
    counts = made.router.counts
    balance_experts(balanced_routers(made))
    assert not made.router.counts
    return counts, made.router.bias


@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_token_is_counted_once(checkpointed: bool, cluster_of: Clusters) -> None:
    chosen, _ = layer().router(tokens(8))
    counts = chosen.flatten().bincount(minlength=4)
    found = cluster_of(2).run(balanced, checkpointed)
    assert torch.equal(found[0][0] + found[1][0], counts)
    for _, bias in found:
        assert torch.equal(bias, 0.125 * (4.0 - counts).sign().double())


def test_a_bias_moves_by_its_rate_also_in_16_bits() -> None:
    made = MixtureOfExperts(replace(TINY, balance_rate=0.001))
    Precision("bf16").convert(made)
    for _ in range(700):
        made.router.counts = torch.tensor([0, 1, 1, 2])
        balance_experts([made.router])
    torch.testing.assert_close(made.router.bias, torch.tensor([0.7, 0.0, 0.0, -0.7]), rtol=0, atol=1e-3)


def test_a_bias_chooses_and_does_not_weight() -> None:
    router = layer().router
    scores = functional.linear(tokens(5), router.weight).softmax(-1)
    router.bias += torch.tensor([9.0, 0.0, 5.0, 0.0])
    chosen, gates = router(tokens(5))
    assert torch.equal(chosen, torch.tensor([[0, 2]] * 5))
    torch.testing.assert_close(gates, scores[:, [0, 2]] / scores[:, [0, 2]].sum(-1, keepdim=True))


def test_a_full_expert_takes_no_more_tokens() -> None:
    made = layer(skew=10.0, capacity=1.0)  # all choose experts 0 and 1; each takes 6 * 2 / 4 = 3 of 6 tokens
    chosen, gates = made.router(tokens(6))
    assert torch.equal(chosen, torch.tensor([[0, 1]] * 3 + [[4, 5]] * 3))
    assert torch.equal(made(tokens(6))[3:], torch.zeros(3, 8, dtype=torch.float64))
    assert not gates[3:].any()


def test_tokens_that_a_full_expert_drops_count_for_the_balance() -> None:
    made = layer(skew=10.0, capacity=0.5, balance_rate=0.125)
    results, *_ = run(made, tokens(6))
    assert results.any(-1).tolist() == [True, True, False, False, False, False]
    assert made.router.counts.tolist() == [6, 6, 0, 0]  # type: ignore[union-attr]


def of_transformers(name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="the layers are those of transformers")
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"), 2)
    sizes |= {"num_hidden_layers": 1, "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12}
    sizes |= {"moe_intermediate_size": 12, "num_local_experts" if name == "Mixtral" else "num_experts": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, experts_implementation="eager")
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def moe_of_transformers(name: str) -> Any:
    return of_transformers(name).model.layers[0].mlp


def run_transformers(name: str, ranks: int) -> tuple[Tensor, Gradients]:
    made = moe_of_transformers(name)
    if ranks > 1:
        share_experts(made)
    return run(made, tokens(6)[None, md.rank() :: ranks])[:2]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_layers_of_transformers_equal_one_process(name: str, cluster_of: Clusters) -> None:
    result, gradients = run_transformers(name, 1)
    found = cluster_of(2).run(run_transformers, name, 2)
    for rank, (own, _) in enumerate(found):
        torch.testing.assert_close(own, result[:, rank::2], rtol=1e-5, atol=1e-6)  # its softmax is in float32
    for key, whole in gradients.items():
        parts = [each[1][key] for each in found]
        joined = torch.cat(parts) if ".experts." in f".{key}" else torch.stack(parts).sum(0)
        torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-6)


def test_a_model_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer with several experts"):
        share_experts(nn.Linear(3, 3))
    assert [*experts_of(GPT(TINY))] == ["layers.1.mlp.experts", "layers.2.mlp.experts"]


def test_ranks_that_do_not_divide_the_experts_are_refused(cluster_of: Clusters) -> None:
    said = "experts has 4 experts, which ep=3 does not divide"
    refused_on_ranks(cluster_of(3), ValueError, said, share_experts, layer())
