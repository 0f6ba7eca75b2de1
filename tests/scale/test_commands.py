"""Wrong words to plan, dryrun and trace: one line says what to do, before anything is measured or started."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from minidist.cli import plan
from tests.conftest import Run

WRONG = {
    "plan": [
        ("--model bert-larg --memory 16GB", "did you mean 'bert-large'"),
        ("--model bert-large --memory '16 apples'", "give bytes such as 16GB"),
        ("--model bert-large --profile h10", "did you mean 'h100'"),
        ("--model bert-large", "neither memory nor a profile is given"),
        ("--model bert-large --memory 16GB --tokens 9999", "of 1 to 512"),
        ("--model bert-large --profile t4 --precision bf16", "has no rate for it"),
        ("--model bert-large --memory 16GB --precision int8", "has no rate for it"),
        ("--model bert-large --memory 16GB --optimizer lion", "optimizer is 'lion'"),
        ("--model bert-large --measure", "a BERT's shape is for estimates only"),
        ("--model gpt2-xl --measure", "give one of at most 50,000,000"),
        ("--model byte-tiny --measure --profile h100", "--measure runs on this machine"),
        ("--model bert-large --ranks 0", "--ranks"),
        ("--model byte-tiny --measure --ranks 17", "measuring this machine would start 17 ranks"),
        ("--model gpt2-xl --profile here --ranks 64", "give at most 16, or a machine"),
        ("--model byte-tiny --profile here --precision int8", "this machine has no rate"),
        ("--model byte-tiny --measure --optimizer lion", "optimizer is 'lion'"),
        ("--model byte-tiny --profile here --tokens 65", "of 1 to 64"),
        ("--model byte-tiny --profile h100 --figures f.json", "and --profile is h100"),
        ("--model byte-tiny --memory 1GB --figures f.json", "and no --profile is given"),
    ],
    "dryrun": [
        ("--model gpt2-xxl --layout dp=2", "did you mean 'gpt2-xl'"),
        ("--model byte-tiny --layout dp=2 --rank 2", "rank is 2; give 0 to 1"),
        ("--model byte-tiny --layout dp=2 --rank all", "or kinds"),
        ("--model byte-tiny --layout dp=2 --profile b52", "hardware profile"),
        ("--model byte-tiny --layout dp=2 --figures f.json", "--figures is for this machine's"),
        ("--model byte-tiny --layout dp=17 --profile here", "measuring this machine would start 17 ranks"),
        ("--model byte-tiny --layout dp=4 --batch 3", "batch is 3 rows and dp is 4"),
        ("--model byte-tiny --layout dp=4 --tokens 65", "give rows, at least 1, of 1 to 64 tokens"),
        ("--model byte-tiny --layout dp=4 --optimizer lion", "unknown optimizer"),
        ("--model byte-tiny --layout pp=2,zero=2", "give zero=1"),
        ("--model byte-tiny --layout tp=8", "4 heads"),
        ("--model byte-tiny --layout dp=4,zero=2,micro_batches=2 --batch 5", "give a multiple of 4"),
        ("--model bert-tiny --layout cp=2", "which divides the tokens, and this is a BERT"),
        (f"--model byte-tiny --layout dp={10**26}", "a dry run takes 262,144 at most"),
        ("--model byte-tiny --layout dp=131073,tp=2,zero=3 --rank kinds", "has 262,146 ranks"),
    ],
    "trace": [
        ("--layout dp=2 --out no/t.json", "there is no folder no; make it"),
        ("--layout dp=2 --out .", "--out . is a folder"),
        ("--layout dp=2 --plot t.gif", "--plot t.gif has to end in .svg, .png, .pdf"),
        ("--layout dp=2 --out t.svg --plot t.svg", "--plot and --out are both t.svg"),
        ("--layout dp=two", "dp is 'two'; give a whole number"),
        ("--layout dp=2 --steps -1", "steps is -1; give at least 0"),
        ("--layout dp=2 --model gtp", "gtp"),
        ("", "--layout"),
    ],
}


@pytest.mark.parametrize(
    ("name", "words", "message"), [(name, *each) for name, several in WRONG.items() for each in several]
)
def test_bad_input_gets_a_sentence(
    run: Run, name: str, words: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "measured", lambda *_, **__: pytest.fail("it is measured first"))
    code, out, error = run(name, *shlex.split(words))
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1
