"""The command `minidist`: one file for each subcommand, and what it runs."""

from minidist.cli.commands import app as app
from minidist.cli.commands import main as main
