"""Pick the findings: up to five sentences, computed from the results, for a reader in a hurry.

Each subject makes a sentence from one machine's results, or None if they lack the figures for it. A sentence
says so if the spread leaves a comparison open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from minidist.benchmarks.harness import machine, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report.finding import Finding
from minidist.benchmarks.report.findings_kernels import collectives, cpu_ladder, cuda_ladder
from minidist.benchmarks.report.findings_training import (
    goals,
    pipelines,
    recompute,
    scaling,
    strategies,
    zero,
)

MOST = 5
Subject = Callable[[list[Entry], Results], Finding | None]
# The most asked come first. Of several subjects in one line, the first that has a finding counts.
SUBJECTS: tuple[tuple[Subject, ...], ...] = (
    (strategies,),
    (zero,),
    (cuda_ladder, cpu_ladder),
    (collectives,),
    (scaling,),
    (pipelines,),
    (recompute,),
    (goals,),
)


def findings(machines: Mapping[str, Results], most: int = MOST) -> list[Finding]:
    """Return at most `most` findings, each from the first machine that has it."""
    entries = {slug: results.newest(found) for slug, found in machines.items()}
    made = []
    for alternatives in SUBJECTS:
        for subject, slug in ((s, m) for s in alternatives for m in machines):
            finding = subject(entries[slug], machines[slug])
            if finding is not None:
                info = machines[slug]["machine_info"]
                named = machine.title(info) if len(machines) > 1 or info.get("another") else ""
                made.append(replace(finding, slug=slug, machine=named))
                break
    return made[:most]
