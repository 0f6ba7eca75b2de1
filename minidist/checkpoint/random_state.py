"""The states of the random number generators: torch's, numpy's, Python's, and a GPU's where there is one."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy
import torch
from torch import Tensor


def random_state() -> Tensor:  # (bytes,) uint8
    """This process's, as JSON in bytes: some ten thousand of them."""
    kept: dict[str, Any] = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),  # noqa: NPY002 - the one that `numpy.random.rand` draws from
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        kept["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    text = json.dumps(kept, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def set_random_state(state: Tensor) -> None:
    """Take what `random_state` returned. ValueError, KeyError or TypeError where it did not."""
    kept = json.loads(bytes(state.tolist()))
    version, words, gauss = kept["python"]
    random.setstate((version, tuple(words), gauss))
    numpy.random.set_state(kept["numpy"])  # noqa: NPY002
    torch.set_rng_state(_bytes(kept["torch"]))
    if "cuda" in kept and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(kept["cuda"]))


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)
