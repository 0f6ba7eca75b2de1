"""The results file of one machine: what the JSON holds, and how a new run is merged into it.

    {"schema": 1,
     "machine_info": {...},                        machine.describe(); no host name
     "runs": {"2025-01-31T12:00:00+00:00": {"mode": "quick", "software": {...}, "commit": "1a2b3c4",
                                            "driver": "580.65.06"}},                  only with a GPU
     "suites": {"bench_launch": "the first paragraph of the suite's docstring"},
     "benchmarks": [{"suite", "group", "name", "fullname", "param", "params", "run", "stats", "extra_info"}]}

`pytest-benchmark compare FILE.json` reads it too: machine_info and benchmarks are its own keys.

A quick run and a full run of the same benchmark are two results, and a run replaces only results of its own
mode. So a quick look never costs the figures of a long night. The report shows the newer of the two and marks
which it is. Results of benchmarks that no longer exist are dropped when all are run again in that mode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import minidist
from minidist._files import check_file, write_whole
from minidist._names import unknown
from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness.columns import BESIDE

SCHEMA = 1
ENTRY = ("suite", "group", "name", "fullname", "run", "stats", "extra_info")
STATS = (
    *("median", "iqr", "q1", "q3", "min", "max", "mean", "stddev", "rounds", "iterations"),
    *("ops", "outliers", "ld15iqr", "hd15iqr"),  # that pytest-benchmark's own table and histogram ask for
)
MACHINE = ("cpu", "cores", "caches", "memory_bytes", "gpus")
REMEDY = "name another file, or move it away and run `minidist bench` again"
DIGITS = 6  # significant digits kept: more than any clock is good for, and a readable diff

Results = dict[str, Any]
Entry = dict[str, Any]


def checkout() -> Path | None:
    """Return the root of the source tree that this package runs from, or None for an installed wheel."""
    root = Path(minidist.__file__).parent.parent
    here = (root / "benchmarks" / "results").is_dir() and (root / "pyproject.toml").is_file()
    return root if here else None


def folder() -> Path:
    """Return the folder for results: in the source tree, or ./minidist-results for an installed package."""
    root = checkout()
    return root / "benchmarks" / "results" if root else Path("minidist-results")


def own_file(where: Path, info: dict[str, Any]) -> Path:
    """Return the path of a machine's results, named after its GPU or else its CPU.

    Many machines have the same GPU, and CPUs of several generations the same name. If the file of that name
    belongs to another machine, the CPU's name is added, or a digest of all that tells machines apart. Raises
    ValueError if such a file can't be read.
    """
    whole = machine.slug(info, whole=True)
    names = (machine.slug(info), whole, f"{whole}-{machine.digest(info)}")
    paths = [where / f"{name}.json" for name in dict.fromkeys(names)]
    own = [path for path in paths if path.exists() and machine.same(load(path)["machine_info"], info)]
    return (own or [path for path in paths if not path.exists()] or paths[-1:])[0]


def load(path: Path) -> Results:
    """Load one machine's results. Raises ValueError, with the remedy, if the file does not hold any."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} can't be read ({error.strerror}): name a results file that `minidist bench` wrote"
        ) from None
    except ValueError:
        raise ValueError(f"{path} is not JSON: {REMEDY}") from None
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        found = results.get("schema") if isinstance(results, dict) else None
        raise ValueError(f"{path} has schema {found}, not {SCHEMA}: {REMEDY}")
    missing = next(_missing(results), None)
    if missing is not None:
        raise ValueError(f"{path} lacks {missing}: {REMEDY}")
    return results


def _missing(results: Results) -> Iterator[str]:
    """Yield the required parts that a results file lacks.

    Only the first one is meaningful, since each check relies on the earlier ones having passed.
    """
    for key, kind in (("machine_info", dict), ("runs", dict), ("suites", dict), ("benchmarks", list)):
        if not isinstance(results.get(key), kind):
            yield f"its {key}"
    yield from (f"its machine_info's {key}" for key in MACHINE if key not in results["machine_info"])
    for name, run in results["runs"].items():
        if not isinstance(run, dict) or "mode" not in run:
            yield f"the mode of its run {name}"
    for number, entry in enumerate(results["benchmarks"]):
        which = f"its benchmark {number}'s"
        if not isinstance(entry, dict):
            yield f"{which} name"
        yield from (f"{which} {key}" for key in ENTRY if key not in entry)
        if entry.get("run") not in results["runs"]:
            yield f"{which} run"
        stats, extra = entry.get("stats"), entry.get("extra_info")
        if not isinstance(stats, dict) or not isinstance(extra, dict):
            yield f"{which} figures"
        yield from (f"{which} {key}" for key in ("median", "iqr", "rounds") if key not in stats)
        for key, needed in BESIDE.items():
            yield from (f"{which} {each}" for each in needed if key in extra and each not in extra)


def check_writable(path: Path, info: dict[str, Any]) -> None:
    """Raise ValueError if `path` cannot be written, or holds no results, or another machine's."""
    check_file("--out", path, make_folder=True)
    if path.exists():
        owner = load(path)["machine_info"]
        if not machine.same(owner, info):
            raise ValueError(
                f"{path} holds results of {machine.title(owner)}, and this is {machine.title(info)}: figures "
                "of two machines in one file would be taken for one machine's; name another file"
            )


def load_all(where: Path) -> dict[str, Results]:
    """Load all machines' results in a folder, by slug."""
    return {path.stem: load(path) for path in sorted(where.glob("*.json"))}


def in_order(where: Path, first: str | None = None) -> tuple[str | None, dict[str, Results]]:
    """Load all machines' results by slug, with machine `first` in front, or else this machine.

    Also returns the slug of that machine, or None if this machine has no results. Results of other machines
    than this one are marked, and `describe_machine.title` says so. Raises ValueError for an unknown machine,
    and for a folder without results.
    """
    if where.is_file():
        raise ValueError(f"{where} is a file: name the folder that holds it")
    if not where.exists():
        raise ValueError(f"there is no folder {where}: name another, or run `minidist bench` first")
    found = load_all(where)
    if not found:
        raise ValueError(f"no results in {where}: run `minidist bench` first")
    if first is not None and first not in found:
        raise unknown("machine", first, found)
    info = machine.describe()
    leader = first or own_file(where, info).stem
    for each in found.values():
        if not machine.same(each["machine_info"], info):
            each["machine_info"] = {**each["machine_info"], "another": True}
    if leader not in found:
        return None, found
    return leader, {leader: found.pop(leader), **found}


def completed(stats: dict[str, Any]) -> dict[str, Any]:
    """Fill in what pytest-benchmark's own table asks for, where an older run did not keep it.

    Without the single rounds nobody knows the outliers, hence the "?". A histogram's whiskers then end at 1.5
    interquartile ranges at most.
    """
    if not {"mean", "q1", "q3", "iqr", "min", "max"} <= stats.keys():
        return stats
    reach = 1.5 * stats["iqr"]
    known = {
        "iterations": 1,
        "ops": 1 / stats["mean"] if stats["mean"] else 0,
        "outliers": "?;?",
        "ld15iqr": max(stats["min"], stats["q1"] - reach),
        "hd15iqr": min(stats["max"], stats["q3"] + reach),
    }
    return {**known, **stats}


def save(results: Results, path: Path) -> None:
    """Write a results file completely or not at all, so that a stopped run leaves the old one intact."""
    entries = [
        {"param": None, "params": None, **entry, "stats": completed(entry["stats"])}
        for entry in results["benchmarks"]
    ]
    results = {**results, "benchmarks": entries}
    text = json.dumps(rounded(results), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def merge(old: Results | None, new: Results, *, everything: Iterable[str] | None = None) -> Results:
    """Merge a new run into the old results, as the top of this file says.

    `new` holds one run. If nothing was filtered out, `everything` holds the `fullname` of all benchmarks of
    this mode, and the mode's results under other names are dropped.
    """
    if old is None:
        return new
    ((_, run),) = new["runs"].items()
    known = None if everything is None else set(everything)
    replaced = {entry["fullname"] for entry in new["benchmarks"]}
    kept = [
        entry
        for entry in old["benchmarks"]
        if old["runs"][entry["run"]]["mode"] != run["mode"]
        or (entry["fullname"] not in replaced and (known is None or entry["fullname"] in known))
    ]
    entries = sorted(kept + new["benchmarks"], key=lambda entry: entry["suite"])  # within one, as they ran
    used = {entry["run"] for entry in entries}
    runs, suites = {**old["runs"], **new["runs"]}, {**old["suites"], **new["suites"]}
    named = {entry["suite"] for entry in entries}
    return {
        **new,
        "runs": {name: described for name, described in runs.items() if name in used},
        "suites": {name: about for name, about in suites.items() if name in named},
        "benchmarks": entries,
    }


def newest(results: Results) -> list[Entry]:
    """Return the newer of each benchmark's quick and full result, with its "mode", in the file's order."""
    latest: dict[str, Entry] = {}
    for entry in results["benchmarks"]:
        before = latest.get(entry["fullname"])
        if before is None or entry["run"] > before["run"]:  # ISO times in UTC sort as text
            latest[entry["fullname"]] = {**entry, "mode": results["runs"][entry["run"]]["mode"]}
    return list(latest.values())


def rounded(value: Any) -> Any:
    """Round floats in a JSON value to `DIGITS` significant digits. Raises ValueError for NaN and infinity."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"a result is {value}, which JSON cannot hold: leave it out of extra_info")
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value
