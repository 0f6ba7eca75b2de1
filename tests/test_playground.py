"""The playground answers as the library does, in Python and in a browser that runs Python itself.

The tests marked `browser` need playwright, an installed Chromium, and the npm package that `make site` gets.
MINIDIST_SCREENSHOTS names a folder for pictures of the page in both themes and at both widths.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minidist.parallel import schedules
from tests.helpers import memory_requests
from tests.helpers.clocks import HANG
from tests.helpers.fresh_python import output_of
from tests.helpers.quiet_pages import quiet_page
from tests.helpers.schedule_requests import cases, library, rounded, written

ROOT = Path(__file__).parent.parent
PYODIDE = ROOT / "build" / "node_modules" / "pyodide"
NAMES = [*schedules.SCHEDULES]


@pytest.fixture(scope="module")
def playground() -> Iterator[Any]:
    """docs/playground.py, by the name by which the page imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import playground

        yield playground
        patch.delitem(sys.modules, "playground")


def test_answers_equal_the_library(playground: Any) -> None:
    made = cases(200)
    wanted = [library(schedule, times) for _, schedule, times in made]
    errors = [want["error"] for want in wanted if "error" in want]
    assert 50 < len(errors) < 150
    assert sum("never ends" in error for error in errors) >= 3
    for (request, _, _), want in zip(made, wanted, strict=True):
        assert rounded(json.loads(playground.answer(json.dumps(request)))) == want


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_it_reads_what_it_writes(playground: Any, name: str, messages: bool) -> None:
    schedule = schedules.by_name(name, 3, 5, schedules.SCHEDULES[name].least_chunks)
    text = playground.write(schedule, messages)
    assert ("recv F" in text) == messages
    assert playground.read(text) == playground.read(text.replace(" ", "   ")) == schedule


def test_commas_and_small_letters_are_read(playground: Any) -> None:
    wanted = playground.read("F0 F1 B0 B1\nF0 B0 F1.1 B1.1")
    assert playground.read("f0, F1,b0;b1\nf0,b0, f1.1 b1.1") == wanted
    messages = "F0 send F0 recv B0 B0\nrecv F0 F0 B0 send B0"
    assert playground.read(messages.lower().replace("f0 ", "f0, ")) == playground.read(messages)
    placed = "F0 F0.1 B0.1 B0\nF0 F0.1 B0.1 B0"
    assert playground.read(f"Stages 0 3, 1 2\n{placed.lower()}").placement.stages == ((0, 3), (1, 2))


def test_a_deadlock_is_drawn_up_to_where_ranks_wait(playground: Any) -> None:
    request = {"schedule": "", "text": "F0 B0 F1 B1\nF0 F1 B0 B1", "messages": False, "rewrite": False}
    found = json.loads(playground.answer(json.dumps({**request, "times": {"forward": 2.0}})))
    assert found["error"].startswith("the schedule never ends: rank 0 waits at recv B0 for rank 1")
    assert found["waiting"] == [[0, "recv B0", 1], [1, "recv F1", 0]]
    assert found["timeline"] == [[["F", 0, 0, 0.0, 2.0]], [["F", 0, 0, 2.0, 4.0]]]


def test_a_word_that_is_no_instruction_is_named(playground: Any) -> None:
    with pytest.raises(ValueError, match=r"^rank 1 has 'Q3', which is no instruction; write F3"):
        playground.read("F0 B0\nF0 Q3")


def test_answers_need_neither_torch_nor_numpy() -> None:
    program = "import sys, playground, playground_memory; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    output_of(program, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "docs")]))


def test_without_the_npm_package_the_page_says_so() -> None:
    pytest.importorskip("mkdocs", reason="the site needs pip install 'minidist[site]'")
    from docs import site_hooks

    assert "package <code>pyodide</code>" in site_hooks.playground("playground", ROOT / "nothing")


@pytest.fixture(scope="module")
def address(site: Path) -> str:
    """The address of the page, a file."""
    if not PYODIDE.exists():
        pytest.skip("the npm package pyodide is missing, which `make site` installs")
    return (site / "playground.html").as_uri()


@pytest.fixture(scope="module")
def page(chromium: Any, address: str) -> Iterator[Any]:
    """The page when Python has started, which must neither complain nor ask for anything but files."""
    with quiet_page(chromium, address) as opened:
        opened.wait_for_function("!!window.playgroundMemory")
        yield opened


def says(verdict: Any, text: str) -> None:
    """Wait until it does: Python answers from a worker."""
    verdict.filter(has_text=text).wait_for()


@pytest.mark.browser
def test_the_page_answers_as_the_library(page: Any) -> None:
    made = cases(200)
    answers = page.evaluate(
        "requests => Promise.all(requests.map(playgroundAnswer))", [request for request, _, _ in made]
    )
    for answer, (_, schedule, times) in zip(answers, made, strict=True):
        assert rounded(answer) == library(schedule, times)


@pytest.mark.browser
def test_an_edit_gets_its_verdict(page: Any) -> None:
    form = page.locator("#playground-form")
    verdict, text = form.locator(".verdict"), form.locator("textarea")
    form.get_by_role("combobox", name="Schedule").select_option("gpipe")
    says(verdict, "the fullest rank holds 8 micro-batches")
    form.get_by_role("combobox", name="Schedule").select_option("1f1b")
    says(verdict, "wait for 27.3 % of the time; the fullest rank holds 4 micro-batches")
    drawn = form.locator(".pass").evaluate_all("paths => paths.map(path => path.getAttribute('d')).join('')")
    assert drawn.count("M") == drawn.count("z") == 4 * 2 * 8
    text.fill(text.input_value().replace("B7", "", 1))
    says(verdict, "rank 0, micro-batch 7, chunk 0: there is no backward pass (B7)")
    assert form.locator("[name=schedule]").input_value() == ""
    assert not form.locator(".chart").is_visible()
    page.get_by_role("button", name="show it").click()
    says(verdict, "the schedule never ends: rank 0 waits at recv B0 for rank 1")
    assert form.locator(".pass").count() == 2  # F0 on both ranks, and an arrow to each from the other
    assert form.locator(".arrow").count() == 2
    assert form.locator(".word").all_text_contents() == [
        "waits: recv B0 of rank 1",
        "waits: recv F1 of rank 0",
    ]
    text.fill("f0, f1, b0, b1\nf0, b0, f1, b1")
    says(verdict, "The schedule is complete")
    assert form.locator(".arrow").count() == 0
    assert form.locator("[name=ranks]").input_value() == "2"
    form.get_by_role("checkbox", name="Write the messages too").check()
    page.wait_for_function(
        "document.querySelector('textarea').value.startsWith('F0 send F0 F1 send F1 recv B0 B0')"
    )
    form.locator("[name=messages]").uncheck()


@pytest.mark.browser
def test_each_field_has_a_name_and_a_ring_when_it_has_the_focus(page: Any) -> None:
    names = "els => els.map(each => [each.name, each.labels[0].control === each])"
    fields = page.locator("form.playground :is(input, select, textarea)").evaluate_all(names)
    assert len(fields) > 20
    assert all(own for _, own in fields), fields
    assert page.get_by_role("slider", name="Ranks", exact=True).count() == 1
    slider = page.get_by_role("slider", name="Forward, s")
    slider.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    style = "each => getComputedStyle(each).outlineStyle"
    assert slider.evaluate(style) == "solid"
    assert page.get_by_role("slider", name="Message, s").evaluate(style) == "none"
    # A slider of doublings says how many ranks it stands for, not the doublings.
    assert page.get_by_role("slider", name="Data-parallel ranks (dp)").get_attribute("aria-valuetext") == "8"


@pytest.mark.browser
def test_a_link_holds_the_state(chromium: Any, page: Any) -> None:
    form = page.locator("#playground-form")
    form.locator("textarea").fill("F0 B0\nF0 B0")
    form.get_by_role("slider", name="Forward, s").fill("2.5")
    says(form.locator(".verdict"), "It takes 9 s")
    form.get_by_role("button", name="Link to this schedule").click()
    says(form.locator(".shared"), "in the address bar")
    other = chromium.new_page()
    other.goto(page.url)
    says(other.locator("#playground-form .verdict"), "It takes 9 s")
    assert other.locator("#playground-form textarea").input_value() == "F0 B0\nF0 B0"
    memory = page.locator("#memory-form")
    memory.get_by_role("combobox", name="Model").select_option("gpt3-13b")
    memory.get_by_role("button", name="Link to this layout").click()
    says(memory.locator(".shared"), "in the address bar")
    other.goto("about:blank")
    other.goto(page.url)
    other.wait_for_function("!!window.playgroundMemory", timeout=HANG * 1000)
    assert other.get_by_role("combobox", name="Model").input_value() == "gpt3-13b"
    other.close()
    memory.get_by_role("combobox", name="Model").select_option("gpt2-xl")


@pytest.mark.browser
def test_the_page_estimates_memory_as_the_library(page: Any) -> None:
    requests = memory_requests.cases(20)
    answers = page.evaluate("requests => Promise.all(requests.map(playgroundMemory))", requests)
    assert answers == [memory_requests.library(request) for request in requests]


@pytest.mark.browser
def test_a_layout_gets_its_bars_and_what_fits(page: Any) -> None:
    form = page.locator("#memory-form")
    form.get_by_role("textbox", name="Memory of a rank").fill("8GB")
    verdict = form.locator(".verdict")
    says(verdict, "does not fit in 8GB. At most 2 rows")
    assert "zero=2,precision=bf16,recompute=True: the fullest rank needs " in verdict.inner_text()
    form.get_by_role("slider", name="ZeRO stage").fill("3")
    says(verdict, "which fits in 8GB")
    assert form.locator(".bar").count() == 4
    assert form.locator(".chosen").inner_text().startswith("ZeRO-3")
    form.get_by_role("slider", name="Pipeline ranks (pp)").fill("1")
    says(verdict, "zero=3 with pp=2 in the layout would send parameters")
    form.get_by_role("slider", name="ZeRO stage").fill("1")
    says(verdict, "the fullest rank needs")
    assert form.locator(".bar").count() == 2


def processor_time(opened: Any) -> float:
    """Seconds that all threads of a page have run, so that other programs do not count."""
    session = opened.context.new_cdp_session(opened)
    session.send("Performance.enable")
    found = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    return float(found["ProcessTime"])


@pytest.mark.browser
@pytest.mark.parametrize("chunks", [1, 4])
def test_an_edit_of_8_ranks_and_32_micro_batches_takes_less_than_100_ms(page: Any, chunks: int) -> None:
    program = """async text => {
        const area = document.querySelector("textarea");
        const chart = document.querySelector(".scroll");
        for (let i = 0; i < 20; i++) {
            area.value = text + " ".repeat(i);
            const watch = resolve => new MutationObserver(resolve).observe(chart, { childList: true });
            const drawn = new Promise(watch);
            area.dispatchEvent(new Event("input", { bubbles: true }));
            await drawn;
        }
    }"""
    made = schedules.interleaved(8, 32, chunks) if chunks > 1 else schedules.one_f_one_b(8, 32)
    passes = [[each for each in own if each.computes] for own in made]
    before = processor_time(page)
    page.evaluate(program, written(passes))
    assert "The schedule is complete" in page.locator("#playground-form .verdict").inner_text()
    assert 0 < processor_time(page) - before < 20 * 0.1


@pytest.mark.browser
def test_it_opens_within_10_s(chromium: Any, address: str) -> None:
    """Processor time of all its threads, so at most that long where nothing else runs."""
    opened = chromium.new_page()
    opened.goto(address)
    opened.wait_for_function("!!window.playgroundMemory", timeout=HANG * 1000)
    assert 0.5 < processor_time(opened) < 10
    opened.close()


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_in_both_themes(chromium: Any, address: str, theme: str, width: int) -> None:
    opened = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    opened.goto(address)
    opened.wait_for_function("!!window.playgroundMemory", timeout=HANG * 1000)
    form = opened.locator("#playground-form")
    form.locator("[name=schedule]").select_option("interleaved")
    says(form.locator(".verdict"), "passes through a chunk")
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    chart = opened.locator(".scroll").bounding_box()
    assert chart["x"] + chart["width"] <= width
    form.locator("[name=ranks]").fill("8")
    opened.locator("[name=zoom]").fill("2")
    opened.locator(".ranks span").nth(7).wait_for()
    bars = opened.locator(".bars").bounding_box()
    assert 0 < bars["x"] < bars["x"] + bars["width"] < width
    boxes = [each.bounding_box() for each in (opened.locator(".scroll svg"), form.locator(".pass").last)]
    assert boxes[0]["width"] > 1.9 * chart["width"]
    assert boxes[0]["height"] > 8 * 30
    middle = boxes[1]["y"] + boxes[1]["height"] / 2  # the box of a path has its stroke too
    assert 7 * 30 < middle - boxes[0]["y"] < 8 * 30
    assert (
        opened.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[theme]
    )
    if folder := os.environ.get("MINIDIST_SCREENSHOTS"):
        opened.screenshot(path=str(Path(folder) / f"playground-{theme}-{width}.png"), full_page=True)
    opened.close()
