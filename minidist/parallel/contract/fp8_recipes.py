"""The FP8 recipes that a layout's precision can name: one record for each says which numbers share a scale.

FP8 has two formats. e4m3 has more digits, for activations and weights; e5m2 has more range, for gradients. A
tensor is multiplied by a scale that brings its largest number near the format's largest. To add a recipe,
write its record here; training/fp8.py reads it, and layouts, memory estimates, tables and tests follow.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; NVIDIA, Transformer Engine (delayed
scaling); DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2 (blocks); Open Compute Project 2023,
"OCP Microscaling Formats (MX) Specification", sections 5 and 6.3.
"""

from __future__ import annotations

from typing import NamedTuple


class Fp8Recipe(NamedTuple):
    """How the operands of a Linear's three products are scaled."""

    scales: str  # in words, for tables
    block: int = 0  # numbers along the sum of a product that share a scale; 0 for the whole tensor
    weight_rows: int = 1  # rows of a weight that share it, too
    powers: bool = False  # scales are powers of two
    history: int = 0  # steps whose largest number makes the scale; 0 for this tensor's own


FP8_RECIPES = {
    "fp8": Fp8Recipe("one a tensor, from its largest number"),
    "fp8_delayed": Fp8Recipe("one a tensor, from the largest of the last 16 steps", history=16),
    "fp8_blocks": Fp8Recipe("one for 1 x 128 numbers, of weights 128 x 128", block=128, weight_rows=128),
    "fp8_mx": Fp8Recipe("one for 1 x 32 numbers, a power of two", block=32, powers=True),
}
"""By name, as `Layout(precision=...)` takes it."""
