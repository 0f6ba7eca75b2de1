"""The report in a real browser: it sorts, explains numbers, saves figures, and fits a phone and a desktop.

Playwright drives a Chromium that is installed; none is downloaded. MINIDIST_SCREENSHOTS names a folder for
pictures of the page in both themes and at both widths, to be looked at.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minidist.benchmarks.harness import results
from minidist.benchmarks.report.page import page as page_of
from tests.helpers import measured
from tests.helpers.quiet_pages import quiet_page

pytestmark = pytest.mark.browser
WIDTHS = {"phone": 390, "desktop": 1280}
STRATEGIES = "#made-up-strategies table"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two machines, as a file that was mailed."""
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    other = measured.machine(*measured.ladder(), cpu="Another")
    path.write_text(page_of({"made up": results.rounded(measured.everything()), "other": other}))
    return path


@pytest.fixture(params=["phone", "desktop"])
def page(request: pytest.FixtureRequest, chromium: Any, report: Path) -> Iterator[Any]:
    """The page, which must neither complain nor ask for anything."""
    width = WIDTHS[request.param]
    with quiet_page(chromium, report.as_uri(), width, has_touch=width < 500) as opened:
        yield opened


def column(page: Any, table: str, number: int) -> list[str]:
    """The texts of a column, from the top."""
    return list(page.locator(f"{table} tbody tr > :nth-child({number})").all_inner_texts())


def test_a_table_sorts_by_mouse_and_by_keyboard(page: Any) -> None:
    heading = page.locator(f"{STRATEGIES} thead th").nth(1)
    first = column(page, STRATEGIES, 2)
    assert first == ["100 ms", "105 ms", "120 ms", "190 ms"]
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(page, STRATEGIES, 2) == first[::-1]
    ratios = page.locator(f"{STRATEGIES} thead th").nth(4)
    ratios.locator("button").click()
    assert heading.get_attribute("aria-sort") is None
    sorted_by = column(page, STRATEGIES, 5)
    assert [text[:4] for text in sorted_by] == ["0.54", "0.98", "1.21", ""]  # what has no peer comes last
    ratios.locator("button").click()
    assert [text[:4] for text in column(page, STRATEGIES, 5)] == ["1.21", "0.98", "0.54", ""]
    ratios.locator("button").click()
    assert ratios.get_attribute("aria-sort") is None
    assert column(page, STRATEGIES, 2) == first


def test_a_number_says_how_it_was_measured(page: Any) -> None:
    number = page.locator(f"{STRATEGIES} tbody td").first
    number.scroll_into_view_if_needed()
    number.click()
    card = page.locator("#card")
    assert card.inner_text().startswith("stats.median of data parallel, overlap: Median 100 ms of 20 rounds")
    assert "Memory: counted by engine.memory()." in card.inner_text()
    assert "benchmarks[0]" in card.inner_text()
    box = card.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]
    page.keyboard.press("Escape")
    assert not card.is_visible()
    page.locator(f"{STRATEGIES} tbody a.note").nth(1).focus()
    page.keyboard.press("Enter")
    assert "In turns with torch ZeroRedundancyOptimizer" in card.inner_text()
    card.get_by_label("Close").click()
    assert not card.is_visible()
    number.hover()
    assert "stats.median; data parallel, overlap: Median 100 ms" in number.get_attribute("title")


def test_a_finding_leads_to_its_row_even_where_it_is_folded(page: Any) -> None:
    link = page.locator(".findings a.figure").first
    target = page.locator(link.get_attribute("href"))
    link.click()
    page.wait_for_function("location.hash.includes('result')")
    assert target.is_visible()
    page.evaluate("location.hash = '#note-7'")
    page.wait_for_function("document.getElementById('note-7').checkVisibility()")


def test_a_figure_is_saved_as_it_looks(page: Any, tmp_path: Path) -> None:
    figure = page.locator("figure:has(svg)").first
    with page.expect_download() as waited:
        figure.locator("button.save").click()
    saved = tmp_path / "saved.svg"
    waited.value.save_as(saved)
    assert waited.value.suggested_filename == "made-up-scaling-strong-figure.svg"
    text = saved.read_text()
    assert "var(" not in text
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert {"width", "height", "viewBox"} <= set(root.keys())
    assert root[0].text.startswith("Strong scaling over 1 to 4 ranks")
    assert root[1].get("fill") == "#ffffff"  # a ground of its own


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_the_screen_in_both_themes(page: Any, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for heading in page.locator("h1, h2, h3, h4, h5").all():
        box = heading.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert (light(ground) > light(ink)) == (theme == "light")
    if folder := os.environ.get("MINIDIST_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"report-{theme}-{width}.png"), full_page=True)


def test_words_of_charts_are_as_large_as_one_can_read(page: Any) -> None:
    """Letters of 10 points in an SVG shrink with it; a screen of 390 pixels leaves them 11."""
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    sizes = page.evaluate(
        """() => [...document.querySelectorAll("figure svg text, .bars p span, .track i, .legend span")]
        .filter((each) => each.textContent.trim())
        .map((each) => parseFloat(getComputedStyle(each).fontSize)
            * (each.ownerSVGElement ? Math.hypot(each.getScreenCTM().a, each.getScreenCTM().b) : 1))"""
    )
    assert len(sizes) > 100
    assert min(sizes) >= 11


def test_a_wide_table_says_that_it_scrolls_and_keeps_its_first_column(page: Any) -> None:
    region = page.locator("#made-up-strategies .scroll").first
    wide = region.evaluate("each => each.scrollWidth > each.clientWidth")
    assert wide  # also on a desktop: eleven columns
    assert page.locator("#made-up-strategies .hint").first.is_visible()
    before = [each.bounding_box()["x"] for each in region.locator("tr > :first-child").all()]
    region.evaluate("each => (each.scrollLeft = 200)")
    assert [each.bounding_box()["x"] for each in region.locator("tr > :first-child").all()] == before
    assert not page.locator("#made-up-lessons .hint").first.is_visible() or page.viewport_size["width"] < 500


def light(color: str) -> float:
    """How light rgb(r, g, b) is."""
    return sum(float(part) for part in color.partition("(")[2].rstrip(")").split(",")[:3])


def test_paper_has_all_notes(page: Any) -> None:
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#note-1").is_visible()
    assert not page.locator("nav").is_visible()
    page.set_viewport_size({"width": 1030, "height": 700})  # of A4 on its side, less its margins
    assert page.evaluate("document.documentElement.scrollWidth") == 1030
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert not page.locator("#note-1").is_visible()
