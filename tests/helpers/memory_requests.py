"""Random questions to the playground about the memory of layouts, and the library's answers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from minidist.model.configs import CONFIGS, GPTConfig
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import size
from minidist.parallel.contract.recompute_policies import POLICIES
from minidist.parallel.contract.schedule_kinds import SCHEDULES
from minidist.parallel.engine.prepare_checks import check_available
from minidist.scale.memory import estimate, fits
from minidist.scale.memory.largest_batch import parse_bytes

MODELS = [name for name, shape in CONFIGS.items() if isinstance(shape, GPTConfig)]


def cases(count: int) -> list[dict[str, Any]]:
    """Requests as the page makes them; some ask for a layout that cannot be trained."""
    made = []
    for seed in range(count):
        draw = random.Random(seed)
        model, pp = draw.choice(MODELS), draw.choice([1, 1, 2, 4])
        schedule = draw.choice([*SCHEDULES]) if pp > 1 else "1f1b"
        layout = {
            "dp": draw.choice([1, 2, 8, 64]),
            "tp": draw.choice([1, 1, 2, 8]),
            "pp": pp,
            "zero": draw.choice([0, 1] if pp > 1 and draw.random() < 0.8 else range(4)),
            "micro_batches": draw.choice([1, 2, 7, 16]),
            "precision": draw.choice(["fp32", "bf16", "fp16"]),
            "recompute": draw.choice([True, *POLICIES]) if draw.random() < 0.5 else False,
            "schedule": schedule,
            "chunks": SCHEDULES[schedule].least_chunks,
        }
        tokens = draw.choice([CONFIGS[model].context, draw.randint(1, CONFIGS[model].context)])
        memory = draw.choice(["500MB", "16GB", "24GiB", "80GB"])
        request = {"model": model, "layout": layout, "rows": draw.randint(1, 64)}
        made.append(request | {"tokens": tokens, "memory": memory})
    return made


def library(request: dict[str, Any]) -> dict[str, Any]:
    """What the library says of a request."""
    model, tokens, budget = request["model"], request["tokens"], parse_bytes(request["memory"])
    try:
        layout = Layout(**request["layout"])
        check_available(layout)
        batch = (request["rows"] * layout.dp, tokens)
        stages = {}
        for zero in range(2 if layout.pp > 1 else 4):
            found = estimate(model, replace(layout, zero=zero), batch=batch)
            numbers = {
                part: getattr(found, part) for part in ("parameters", "gradients", "optimizer", "activations")
            }
            numbers |= {"temporary": found.transient, "peak": found.total + found.transient}
            stages[str(zero)] = {part: [number, size(number)] for part, number in numbers.items()}
        rows = fits(budget, [model], [layout], tokens)[0].rows
    except ValueError as error:
        return {"error": str(error)}
    return {"layout": str(layout), "stages": stages, "budget": budget, "rows": rows}
