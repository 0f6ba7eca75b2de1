"""The playground's answers about memory: a model and a layout in, the bytes of a rank out, all as JSON.

The page runs this file in the browser, by Pyodide, with the library's own `estimate` and `fits`. So it says
what `minidist plan` and `python -m minidist.scale.memory` say.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

from minidist.model.configs import CONFIGS, GPTConfig
from minidist.parallel.contract.layout import PRECISIONS, Layout, check_available
from minidist.parallel.contract.memory_report import PARTS, size
from minidist.parallel.contract.recompute_policies import POLICIES
from minidist.parallel.contract.residency import ROWS
from minidist.parallel.contract.schedule_kinds import SCHEDULES
from minidist.scale.memory.bar_chart import COLORS
from minidist.scale.memory.estimates import Estimate, estimate
from minidist.scale.memory.largest_batch import count, fits, parse_bytes

SHOWN = [part for part in PARTS if part != "buffers"]  # a GPT has no buffers


def choices() -> str:
    """Models, precisions, schedules and policies to choose from; the parts of memory with their colours."""
    models = {
        name: [f"{name}, {count(shape.parameters())}", shape.context]
        for name, shape in CONFIGS.items()
        if isinstance(shape, GPTConfig)
    }
    schedules = {name: [kind.title, kind.least_chunks] for name, kind in SCHEDULES.items()}
    colors = {part: COLORS[part] for part in SHOWN}
    known = {"models": models, "precisions": PRECISIONS, "schedules": schedules, "policies": [*POLICIES]}
    return json.dumps({**known, "colors": colors, "stages": [*ROWS]})


def answer(request: str) -> str:
    """Estimate the memory of the fullest rank, for the layout and for its other ZeRO stages.

    The request has "model" (a name), "layout" (the fields of a `Layout`), "rows" (on each data-parallel
    rank), "tokens" (in a row) and "memory" (of a rank, such as "80GB"). The answer has "error"; or "layout"
    as text, "stages" with the bytes by ZeRO stage, "budget" in bytes, and "rows", the most that fit on a
    data-parallel rank.
    """
    asked = json.loads(request)
    name, rows, tokens = asked["model"], asked["rows"], asked["tokens"]
    try:
        layout, budget = Layout(**asked["layout"]), parse_bytes(asked["memory"])
        check_available(layout)
        layouts = {}
        for zero in ROWS:
            with contextlib.suppress(ValueError):  # a pipeline takes some of them alone
                check_available(each := replace(layout, zero=zero))
                layouts[zero] = each
        batch = rows * layout.dp, tokens
        stages = {zero: written(estimate(name, each, batch=batch)) for zero, each in layouts.items()}
        [largest] = fits(budget, [name], [layout], tokens)
    except (TypeError, ValueError) as error:
        return json.dumps({"error": str(error)})
    return json.dumps({"layout": str(layout), "stages": stages, "budget": budget, "rows": largest.rows})


def written(found: Estimate) -> dict[str, list[int | str]]:
    """Each part of an estimate as bytes, and as text with a unit."""
    parts = {part: getattr(found, part) for part in SHOWN}
    parts |= {"temporary": found.transient, "peak": found.peak}
    return {part: [number, size(number)] for part, number in parts.items()}
