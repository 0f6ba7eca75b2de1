"""The attention ladder beside torch's scaled_dot_product_attention, on as many cores; 8 heads of 64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minidist.benchmarks.bench_cpu_matmul import PAUSE
from minidist.benchmarks.harness.turns import Benchmark, compared, turns
from minidist.kernels import ATTENTION_LADDER
from minidist.kernels.attention_rung import AttentionRung

LAST = ATTENTION_LADDER[-1]
CASES = [  # rung, positions, and whether causal and backward
    *((step, 128, False, False) for step in ATTENTION_LADDER[:-1]),
    *((LAST, 1024, causal, backward) for causal in (False, True) for backward in (False, True)),
]


@pytest.mark.parametrize(
    ("step", "positions", "causal", "backward"), CASES, ids=lambda x: getattr(x, "name", str(x))
)
@compared("Attention, 8 heads of 64, float32, beside torch")
def test_attention(
    benchmark: Benchmark, full: bool, step: AttentionRung, positions: int, causal: bool, backward: bool
) -> None:
    """A rung forward; the last one also causal and backward, with torch's time as its goal."""
    q, k, v, slope = np.random.default_rng(0).standard_normal((4, 8, positions, 64)).astype("f")
    tensors = [torch.from_numpy(x)[None].requires_grad_(backward) for x in (q, k, v)]
    out, logs = step.forward(q, k, v, causal=causal)

    def theirs() -> Any:
        attention: Any = torch.nn.functional.scaled_dot_product_attention
        return attention(*tensors, is_causal=causal)

    def ours_back() -> Any:
        return step.backward(q, k, v, out, logs, slope, causal=causal)

    def theirs_back() -> Any:
        return torch.autograd.grad(graph, tensors, torch.from_numpy(slope)[None], retain_graph=True)

    alone, threads = step.cores == "one", torch.get_num_threads()
    torch.set_num_threads(1 if alone else threads)
    graph = theirs()
    torch.testing.assert_close(torch.from_numpy(out), graph.detach()[0], rtol=1e-4, atol=1e-5)
    pair = (ours_back, theirs_back) if backward else (lambda: step.forward(q, k, v, causal=causal), theirs)
    name, pause = "scaled_dot_product_attention", 0.0 if alone else PAUSE
    turns(benchmark, *pair, peer_name=name, budget=4.0 if full else 1.0, pause=pause)
    torch.set_num_threads(threads)
    benchmark.extra_info["label"] = f"{step.name}, {positions}{', causal' * causal}{', backward' * backward}"
    if step is LAST:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": 1.0}
