"""Says in one line that a Python is too old. An old pip fetches packages for it first. See pyproject.toml."""

import sys

from setuptools import setup

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"minidist needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")
setup()
