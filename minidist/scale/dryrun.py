"""The dry run, under the path that programs import; see `dry_run/run.py`."""

from minidist.scale.dry_run.run import (
    DryRun as DryRun,
)
from minidist.scale.dry_run.run import (
    dryrun as dryrun,
)
