"""The page: it needs nothing else, is well formed, and an order of cells, an escape and a note are right."""

import html as entities
import re
from html.parser import HTMLParser

import pytest

from minidist.benchmarks.harness import columns, results
from minidist.benchmarks.report import bars, card, chapters, page, printed
from minidist.benchmarks.report.page import Notes
from minidist.benchmarks.report.pieces import Cell
from tests.benchmarks.report.test_whole_report import MACHINES
from tests.helpers import measured


class Elements(HTMLParser):
    """A page's elements; fails where one is left open or closed twice."""

    VOID = ("meta", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.all = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def well_formed(html):
    """The elements of a page with unique ids, in which each link has its target."""
    elements = Elements(html).all
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#|aria-labelledby=")([\w-]+)', html)) <= set(ids)
    return elements


@pytest.fixture(scope="module")
def html():
    return page.page(MACHINES)


def test_the_page_is_well_formed_and_asks_nothing_of_a_network(html):
    for tag, attributes in well_formed(html):
        assert tag not in ("img", "iframe", "object", "form")
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in html  # a browser would refuse it, too
    assert page.page(MACHINES) == html


def test_figures_are_described_and_take_the_pages_colours(html):
    elements = Elements(html).all
    drawn = [attributes for tag, attributes in elements if tag == "svg"]
    charts = [each for _, each in elements if each.get("class", "").startswith("bars")]
    assert len(charts) > len(drawn) > 2
    assert all(each["role"] == "img" and len(each["aria-label"]) > 30 for each in drawn + charts)
    assert not any("width" in each or "height" in each for each in drawn)
    # A colour that the page does not know would be black on black for half of the readers.
    assert not re.findall(r"#000[01]f\d", html)
    inside = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", inside)) <= {"#000000", "#ffffff"}
    assert set(re.findall(r"var\((--[\w-]+)\)", html)) <= {*re.findall(r"(--[\w-]+):", html)}


def test_the_page_is_for_light_and_dark_and_for_a_phone(html):
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    scrolling = [attributes for _, attributes in Elements(html).all if attributes.get("class") == "scroll"]
    assert scrolling
    assert all(attributes["tabindex"] == "0" for attributes in scrolling)


def test_what_it_was_given_is_escaped(html):
    assert "Made &lt;Up&gt; &amp; Co" in html
    assert "What <code>bench_pipeline</code> is &lt;about&gt;." in html


def test_another_machine_is_folded_away_and_has_one_link(html):
    inside = html[html.index('<section id="others">') :].partition("<details>")[2]
    for each in chapters.CHAPTERS:
        assert (f'id="other-{each.name}"' in html) == (f'id="other-{each.name}"' in inside)
    contents = html[html.index("<nav") : html.index("</nav>")]
    assert ('href="#others"' in contents, "#other-" in contents) == (True, False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("26.5 KB", 26500.0),
        ("3.14 ms", 0.00314),
        ("5.68 µs", 5.68e-6),
        ("2.00 ns", 2e-9),
        ("1.50 GB", 1.5e9),
        ("0.98 (0.93–1.03) undecided", 0.98),
        ("12,300", 12300.0),
        ("±4%", 4.0),
        ("+3.00 µs", 3e-6),
        ("64 KiB", 65536.0),
        *((text, None) for text in ("met, < 10.0 ms", "torch DDP", "–", "")),
    ],
)
def test_cells_sort_by_what_they_mean(text, value):
    assert Cell(text).value == (None if value is None else pytest.approx(value))


def test_every_column_says_where_its_figures_stand():
    assert [column.heading for column in columns.COLUMNS if not column.key] == []


def test_a_result_that_is_shown_twice_has_one_note_and_one_id():
    found = MACHINES["other"]
    notes, source = Notes({"other": found}), ("other", results.newest(found)[0])
    assert notes.number(source) == notes.number(source) == 1
    assert (notes.anchor(source), notes.anchor(source)) == ("other-result-0", None)


def test_charts_of_a_part_of_what_was_measured():
    (entry, _) = measured.pipelines()
    del entry["extra_info"]["timeline"]["measured"]
    drawn = bars.timeline(entry)
    assert "measured" not in drawn.alt
    assert [row.name for row in drawn.rows] == ["rank 0", "rank 1"]
    assert max(box.left + box.width for row in drawn.rows for box in row.boxes) == pytest.approx(1.0)
    assert bars.lessons(measured.lessons()[:1]) is None
    over = bars.memory([("a", {"parameters": 900}), ("b", {"parameters": 1500})], "", 1000)
    assert [row.text for row in over.rows] == ["900 B", "1.50 KB, too much"]
    assert (over.lines, over.rows[1].boxes[0].width) == ({"the limit, 1.00 KB": pytest.approx(2 / 3)}, 1.0)


def test_the_command_writes_markdown_to_stdout_or_to_a_file(run, tmp_path):
    results.save(MACHINES["made up"], tmp_path / "made-up.json")
    (code, text, err), second, third = (
        run("report", "--results", str(tmp_path), "--markdown", *words)
        for words in ([], ["--out", str(tmp_path / "part.md")], ["--json"])
    )
    assert (code, err) == (0, "")
    found = results.in_order(tmp_path)[1]  # marks what another machine measured
    assert text == (tmp_path / "part.md").read_text() == printed.markdown(found)
    assert second[0] == 0
    assert not (tmp_path / "report.html").exists()
    assert (third[0], third[2].count("\n")) == (2, 1)
    assert "--markdown and --json" in third[2]


def test_a_machine_with_little_measured_has_a_card_too():
    only = measured.machine(measured.entry("launch", "Starting ranks", "no_op", 1e-4))
    assert [name for name, text in card.facts(only).items() if text] == ["Cores", "Caches"]
    shown = page.page({"m": only})
    assert "Run <code>minidist bench</code>" in shown
    assert "median over pairs" not in entities.unescape(shown)  # which nothing here is
    well_formed(shown)
