"""The site has no dead link, needs no network, and has every public name; its pictures are up to date."""

from __future__ import annotations

import importlib
import json
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness import results

ROOT = Path(__file__).parent.parent
PICTURES = sorted(each.name for each in (ROOT / "docs" / "pictures").glob("*.svg"))
pytestmark = pytest.mark.deep


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?https?://[^>]*", re.IGNORECASE
    )
    for page in site.rglob("*.html"):
        found = [tag for tag in loads.findall(page.read_text()) if 'rel="canonical"' not in tag]
        assert not found, f"{page.relative_to(site)}: {found}"


def test_every_link_picture_and_anchor_leads_somewhere(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: {*re.findall(r'\s(?:id|name)="([^"]+)"', html)} for page, html in pages.items()}
    dead = set()
    for page, html in pages.items():
        for link in re.findall(r'<[^>]*?\s(?:href|src)="((?!\w+:)[^"]*)"', html):
            path, _, anchor = unquote(unescape(link)).partition("#")
            to = (page.parent / path).resolve() if path else page
            if not to.is_file() or (anchor and anchor not in anchors[to]):
                dead.add(f"{page.relative_to(site)}: {link}")
    assert len(pages) > 200
    assert not dead


def test_the_report_is_a_page_with_every_machine_and_leads_back(site: Path) -> None:
    html = (site / "report.html").read_text()
    for found in results.load_all(ROOT / "benchmarks" / "results").values():
        assert f">{machine.title(found['machine_info'])}<" in html  # another machine's section is folded
    assert 'href="index.html"' in html
    assert "another machine" not in html  # the reader may sit at any
    for page in ("index.html", "strategies/zero.html"):
        assert re.search(r'href="(\.\./)?report\.html"', (site / page).read_text()), page


def test_pages_of_strategies_have_their_pictures(site: Path) -> None:
    for name in ("data_parallel", "zero", "tensor_parallel", "pipeline", "cut_the_model"):
        text = (site / "strategies" / f"{name}.html").read_text()
        assert "<svg" in text.split("<article", 1)[1].split("</article>")[0] or "pictures/" in text, name


def test_strategies_collectives_and_kernels_have_an_example(site: Path) -> None:
    from docs.reference import examples

    for page in ("minidist", "comm", "kernels"):
        html = (site / "api" / f"{page}.html").read_text()
        for name in [each for each in examples() if each.split(".")[-2] == page]:
            section = html.split(f'id="{name}"', 1)[1].split("<h2 ", 1)[0]
            assert "Example, on two ranks" in section, name
    collectives = "all_reduce all_gather all_to_all broadcast gather reduce_scatter scatter send recv barrier"
    assert {f"minidist.comm.{name}" for name in collectives.split()} <= {*examples()}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures as docs/pictures.py draws them today."""
    pytest.importorskip("matplotlib", reason="pictures need pip install 'minidist[site]'")
    from docs import pictures

    folder = tmp_path_factory.mktemp("pictures")
    pictures.main(folder)
    return folder


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_what_would_be_drawn_today(drawn: Path, picture: str) -> None:
    kept, now = (folder.joinpath(picture).read_text() for folder in (ROOT / "docs" / "pictures", drawn))
    matplotlib = [re.findall("Matplotlib v[^,]*", svg) for svg in (kept, now)]
    if matplotlib[0] != matplotlib[1]:
        pytest.skip(f"the picture was drawn by {matplotlib[0][0]}, and each version draws otherwise")
    assert kept == now, "run: python docs/pictures.py"


@pytest.mark.parametrize(
    "module", ["minidist", "minidist.comm", "minidist.parallel.schedules", "minidist.kernels"]
)
def test_the_reference_has_every_public_name(site: Path, module: str) -> None:
    page = (site / "api" / f"{module.rpartition('.')[2]}.html").read_text()
    names = importlib.import_module(module).__all__
    missing = [
        name for name in names if f'id="{module}.{name}"' not in page and name not in ("comm", "kernels")
    ]
    assert not missing
    assert "<blockquote" not in page  # what Markdown makes of the `>>>` of an example


def test_arguments_in_a_group_have_their_own_defaults(site: Path) -> None:
    for page in (site / "api").glob("*.html"):
        names = re.findall(r"<tr[^>]*>\s*<td>\s*<code>([^<]*)</code>", page.read_text())
        assert [name for name in names if "," in name] == []
    text = unescape(re.sub(r"<[^>]*>", " ", (site / "api" / "minidist.html").read_text()))
    words = re.sub(r"\s+", " ", text)
    assert re.search(r" bias bool of the whole layer\. True ", words)


def test_the_first_screen_says_what_was_measured(site: Path) -> None:
    html = (site / "index.html").read_text()
    first, last = map(float, re.findall(r"From ([\d.]+) to (\d+) GFLOP/s in seven files", html)[0])
    found = [
        row["extra_info"]["gflops"]
        for each in results.load_all(ROOT / "benchmarks" / "results").values()
        for row in each["benchmarks"]
        if "gflops" in row["extra_info"]
    ]
    assert any(f"{speed:.1g}" == f"{first:g}" for speed in found)
    assert any(round(speed) == last for speed in found)
    assert last > 1000 * first
    assert html.count("md-button") >= 4


def test_a_lesson_shows_the_outputs_of_its_own_cells_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from docs import run_lessons, site_hooks

    monkeypatch.setattr(run_lessons, "EXECUTED", tmp_path)
    monkeypatch.setattr(site_hooks, "EXECUTED", tmp_path)
    lesson = ROOT / "lessons" / "02_cpu_gpu_tpu.ipynb"
    made = json.loads(lesson.read_text())
    assert not run_lessons.is_fresh(lesson.stem, made["cells"])
    for cell in made["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [{"output_type": "stream", "text": "an output"}]
    (tmp_path / lesson.name).write_text(json.dumps(made))
    assert run_lessons.is_fresh(lesson.stem, made["cells"])
    assert site_hooks.text(lesson).count("an output") > 5
    changed = [*made["cells"][:-1], {**made["cells"][-1], "source": "another"}]
    assert not run_lessons.is_fresh(lesson.stem, changed)
    (tmp_path / lesson.name).write_text(json.dumps({**made, "cells": made["cells"][1:]}))
    assert "an output" not in site_hooks.text(lesson)
