"""The dry run at its public import path; see `dry_run/run.py`."""

from minidist.scale.dry_run.run import DryRun, dryrun

__all__ = ["DryRun", "dryrun"]
