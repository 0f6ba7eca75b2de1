"""Made-up results of every kind that the report shows, small enough to know each number of."""

from __future__ import annotations

from typing import Any

from minidist.benchmarks.harness import results
from minidist.parallel import schedules

QUICK, FULL = "2025-01-01T00:00:00+00:00", "2025-02-03T04:05:06+00:00"
SOFTWARE = {
    "os": "Linux 6.1",
    "python": "3.12.1",
    "numpy": "2.1",
    "torch": "2.8",
    "numba": "0.66",
    "blas": None,
}


def entry(suite: str, group: str, name: str, median: float, run: str = FULL, **extra: Any) -> dict[str, Any]:
    """A result of 20 rounds that vary by a tenth."""
    stats = {"median": median, "iqr": 0.1 * median, "q1": 0.95 * median, "q3": 1.05 * median}
    stats |= {"min": 0.9 * median, "max": 1.3 * median, "rounds": 20}
    fullname = f"bench_{suite}.py::test_{name}"
    return {
        "suite": f"bench_{suite}",
        "group": group,
        "name": f"test_{name}",
        "fullname": fullname,
        "run": run,
        "stats": stats,
        "extra_info": {"label": name, **extra},
    }


def beside(peer: str, ours: float, ratio: float, spread: float = 0.05) -> dict[str, Any]:
    """A comparison whose pairs' middle half is the ratio, less and more the spread."""
    return {
        "peer": peer,
        "peer_median": ours / ratio,
        "peer_iqr": 0.1 * ours,
        "ratio": ratio,
        "pair_ratio_q1": ratio - spread,
        "pair_ratio_q3": ratio + spread,
    }


def machine(*entries: dict[str, Any], cpu: str = "Made <Up> & Co", cores: int = 2) -> results.Results:
    """A machine's results."""
    return {
        "schema": results.SCHEMA,
        "machine_info": {
            "cpu": cpu,
            "cores": cores,
            "memory_bytes": 2**34,
            "caches": {"L2": "1 MiB"},
            "gpus": None,
        },
        "runs": {
            QUICK: {"mode": "quick", "software": SOFTWARE, "commit": "1a2b3c4"},
            FULL: {"mode": "full", "software": SOFTWARE, "commit": "5d6e7f8+"},
        },
        "suites": {each["suite"]: f"What `{each['suite']}` is <about>." for each in entries},
        "benchmarks": list(entries),
    }


def strategy(
    name: str, layout: str, ms: float, sent: int, memory: tuple[int, ...], **extra: Any
) -> dict[str, Any]:
    """A row of the table of strategies."""
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    return entry(
        "strategies",
        "Strategies: a byte GPT",
        f"gpt[{name}]",
        ms / 1e3,
        strategy=name,
        layout=layout,
        model="byte-small",
        ranks=2,
        bytes_per_step=sent,
        memory=dict(zip(parts, memory, strict=True)),
        memory_source="counted by engine.memory()",
        yardstick="plain torch",
        yardstick_median=ms / 1.1e3,
        over_yardstick=1.1,
        over_yardstick_q1=1.05,
        over_yardstick_q3=1.15,
        **{"label": name, **extra},
    )


def strategies() -> list[dict[str, Any]]:
    """Four: faster, undecided, slower, and one without a peer."""
    mb = 10**6
    return [
        strategy(
            "data parallel, overlap", "dp=2", 100, 13 * mb, (12 * mb, 12 * mb, 24 * mb, 9 * mb, 0),
            **beside("torch DDP", 0.1, 0.98, 0.05),
        ),
        strategy(
            "ZeRO-1", "dp=2,zero=1", 105, 13 * mb, (12 * mb, 12 * mb, 12 * mb, 9 * mb, 0),
            **beside("torch ZeroRedundancyOptimizer", 0.105, 0.54),
        ),
        strategy(
            "ZeRO-3", "dp=2,zero=3", 120, 19 * mb, (6 * mb, 6 * mb, 12 * mb, 9 * mb, 0),
            **beside("torch fully_shard", 0.12, 1.21), peer_memory=40 * mb,
        ),
        strategy("layer by layer", "pp=2", 190, mb, (6 * mb, 6 * mb, 12 * mb, 9 * mb, 0)),
    ]  # fmt: skip


def timeline(name: str, stretched: float = 1.0) -> list[list[list[Any]]]:
    """A schedule of two ranks and four micro-batches, forward 1 ms and backward 2 ms."""
    made = schedules.simulate(schedules.by_name(name, 2, 4, 1), {"forward": 1e-3, "backward": 2e-3})
    return [
        [
            [each.kind, each.micro_batch, each.chunk, start * stretched, end * stretched]
            for each, start, end in rank
        ]
        for rank in made.timeline
    ]


def pipelines() -> list[dict[str, Any]]:
    """GPipe and 1F1B with their timelines."""
    return [
        entry(
            "pipeline",
            "Pipelines: what ranks did",
            f"timeline[{name}]",
            0.016,
            label=name,
            schedule=name,
            timeline={"simulated": timeline(name), "measured": timeline(name, 1.1)},
            bubble={"simulated": 0.2, "measured": waits},
        )
        for name, waits in (("gpipe", 0.231), ("1f1b", 0.224))
    ]


def scaling() -> list[dict[str, Any]]:
    """Strong and weak, of two strategies on up to four ranks."""
    efficiency = {"data parallel": (1.0, 0.93, 0.41), "ZeRO-2": (1.0, 0.88, 0.37)}
    return [
        entry(
            "scaling",
            f"{kind.capitalize()} scaling",
            f"{kind}[{series}-{ranks}]",
            0.1 / ranks,
            label=f"{series}, {ranks} ranks",
            scaling=kind,
            series=series,
            size=ranks,
            efficiency=share,
        )
        for kind in ("strong", "weak")
        for series, shares in efficiency.items()
        for ranks, share in zip((1, 2, 4), shares, strict=True)
    ]


def collectives() -> list[dict[str, Any]]:
    """Two ways beside gloo at two sizes, and predictions of one."""
    found = [
        entry(
            "collectives",
            "Collectives beside gloo",
            f"gloo[{way}-{size}]",
            1e-9 * size,
            label=f"{way}, {size >> 10} KiB, 2 ranks",
            ranks=2,
            bytes=size,
            **beside("gloo", 1e-9 * size, ratio),
        )
        for way, ratio in (("all-reduce in shared memory", 0.2), ("all-reduce by our ring", 1.02))
        for size in (2**16, 2**20)
    ]
    return found + [
        entry(
            "collectives",
            "All-reduce: measured and predicted",
            f"prediction[{size}]",
            1e-3 * (1 + size / 2**20),
            series="ring",
            bytes=size,
            predicted=1.1e-3 * (1 + size / 2**20),
            median_error=0.1,
            fit={"alpha": 1e-3, "beta": 2.5e-10},
        )
        for size in (2**10, 2**16, 2**20)
    ]


def ladder() -> list[dict[str, Any]]:
    """The first rung and the last on one core."""
    return [
        entry(
            "cpu_matmul",
            "Matrix products on one CPU core, float32",
            f"rung[{series}-{size}]",
            0.01,
            label=f"s{series.replace(' ', '_')}, {size}",
            series=series,
            size=size,
            gflops=rate,
            peer_gflops=100.0,
            percent_of_peer=rate,
            percent_of_peak=rate / 1.25,
            **beside("numpy.matmul", 0.01, 100 / rate, 0.02),
        )
        for series, size, rate in (
            ("1 python loops", 64, 0.01),
            ("6 tile", 64, 50.0),
            ("6 tile", 2048, 104.0),
        )
    ]


def lessons() -> list[dict[str, Any]]:
    """One exercise at par, and one above it."""
    group = "Lessons: what the solutions cost against par"
    return [
        entry("lessons", group, name, 0.01, cost=cost, par=par, unit="steps")
        for name, cost, par in (("ring", 6, 6), ("tree", 10, 8))
    ]


def rungs() -> list[dict[str, Any]]:
    """The first rung, one that the engine beats, and one that it does not have."""
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    over = {"yardstick": "the rung one_process", "yardstick_median": 0.04, "over_yardstick": 0.6}
    over |= {"over_yardstick_q1": 0.55, "over_yardstick_q3": 0.65}
    return [
        entry(
            "plain", "The training ladder: a GPT", f"rung[{name}]", 0.04,
            label=name, idea=f"the idea of {name}", lines=lines, held=16 * 10**6, bytes_per_step=sent,
            memory=dict(zip(parts, (4 * 10**6, 4 * 10**6, 8 * 10**6, 9 * 10**6, 0), strict=True)), **extra,
        )
        for name, lines, sent, extra in (
            ("one process", 29, 0, beside("Layout()", 0.04, 0.98)),
            ("ZeRO 9", 120, 5 * 10**6, {**beside("Layout(zero=9)", 0.04, 1.42), **over}),
            ("experts", 118, 2 * 10**6, over),
        )
    ]  # fmt: skip


def everything() -> results.Results:
    """A machine that measured all of it."""
    parts = (strategies, rungs, pipelines, scaling, collectives, ladder, lessons)
    launch = entry("launch", "Starting ranks", "no_op", 2.6e-4, QUICK, goal={"of": "median", "below": 0.01})
    return machine(*(each for part in parts for each in part()), launch)
