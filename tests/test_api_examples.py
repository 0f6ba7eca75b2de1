"""The examples of the API reference run as they are printed."""

from __future__ import annotations

import pytest

from minidist import RankError

pytest.importorskip("griffe", reason="the reference needs pip install 'minidist[site]'")
from docs.reference import PREAMBLE, examples
from tests.conftest import Clusters


def run_example(code: str) -> None:
    exec(compile(code, "<example>", "exec"), {"__name__": "example"})


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_reference_runs_on_two_ranks(cluster_of: Clusters, name: str) -> None:
    cluster_of(2).run(run_example, PREAMBLE + EXAMPLES[name])


def test_a_wrong_example_is_found(cluster_of: Clusters) -> None:
    wrong = EXAMPLES["minidist.comm.all_reduce"].replace("30.0]", "31.0]")
    with pytest.raises(RankError, match="AssertionError"):
        cluster_of(2).run(run_example, PREAMBLE + wrong)
