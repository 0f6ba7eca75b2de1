"""Handwritten digits of 8 x 8 pixels in a row, with what is written below each (lesson 7)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from checks.figures import show

PIXEL, GAP = 8, 14


def digit_pictures(images: Any, words: Sequence[str], caption: str) -> None:
    """Show images, (n, 64) from 0 to 1: ink has the colour of the page's letters."""
    side, parts = 8 * PIXEL, []
    for place, (image, word) in enumerate(zip(np.asarray(images).reshape(-1, 8, 8), words, strict=True)):
        left = place * (side + GAP)
        parts.append(
            f'<rect x="{left}" y="0" width="{side}" height="{side}" fill="none" stroke="currentColor" '
            'stroke-opacity="0.25"/>'
        )
        parts += [
            f'<rect x="{left + PIXEL * column}" y="{PIXEL * row}" width="{PIXEL}" height="{PIXEL}" '
            f'fill="currentColor" fill-opacity="{ink:.3g}"/>'
            for (row, column), ink in np.ndenumerate(image)
            if ink > 0
        ]
        parts.append(
            f'<text x="{left + side / 2}" y="{side + 17}" font-size="13" text-anchor="middle" '
            f'fill="currentColor">{html.escape(word)}</text>'
        )
    width = max(1, len(words)) * (side + GAP) - GAP
    show(
        f'<svg viewBox="-1 -1 {width + 2} {side + 26}" style="width: 100%; max-width: {width}px" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>',
        caption,
        alt=f"{len(words)} handwritten digits of 8 by 8 pixels, labelled {', '.join(words)}.",
    )
