"""What was measured of a machine, as a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from minidist.comm.cost.links import Link, LinkProfile, SharedMemoryCost
from minidist.scale.time.rates import Crowd, Hardware, Rates

FORMAT = 1


def save(hardware: Hardware, path: str | Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    file = Path(path)
    text = json.dumps({"format": FORMAT, "hardware": dataclasses.asdict(hardware)}, indent=1)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def load(path: str | Path) -> Hardware:
    """What `save` wrote.

    Raises:
        ValueError: the file holds something else.
        OSError: it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        kept = json.loads(text)
        if kept["format"] != FORMAT:
            raise ValueError
        return _hardware(kept["hardware"])
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError(
            f"{path} holds no machine's figures of this version; give another file, or remove it"
        ) from None


def _hardware(fields: dict[str, Any]) -> Hardware:
    crowds = {int(ranks): _crowd(each) for ranks, each in fields["crowds"].items()}
    rates = None if fields["rates"] is None else Rates(**fields["rates"])
    links = {name: _profile(fields[name]) for name in ("inside", "between")}
    return Hardware(**{**fields, **links, "crowds": crowds, "rates": rates})


def _crowd(fields: dict[str, Any]) -> Crowd:
    links = None if fields["links"] is None else _profile(fields["links"])
    return Crowd(**{**fields, "rates": Rates(**fields["rates"]), "links": links})


def _profile(fields: dict[str, Any]) -> LinkProfile:
    links = {name: Link(**each) for name, each in fields["links"].items()}
    memory = None if fields["memory"] is None else SharedMemoryCost(**fields["memory"])
    return LinkProfile(**{**fields, "links": links, "memory": memory})
