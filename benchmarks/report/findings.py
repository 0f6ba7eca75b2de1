"""What was found: five sentences, each computed from results, that a reader in a hurry takes home.

Each subject looks at one machine's results and makes a sentence of them, or none where they do not have what
it takes; then the next subject has its turn. What the spread leaves open is said to be open.
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
# In the order of what readers ask; of several in one line the first that has something to say.
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
    """At most so many findings, each of the first machine that has it."""
    entries = {slug: results.newest(found) for slug, found in machines.items()}
    made = []
    for alternatives in SUBJECTS:
        for subject, slug in ((s, m) for s in alternatives for m in machines):
            finding = subject(entries[slug], machines[slug])
            if finding is not None:
                named = machine.title(machines[slug]["machine_info"]) if len(machines) > 1 else ""
                made.append(replace(finding, slug=slug, machine=named))
                break
    return made[:most]
