"""The page: it needs nothing else, a number leads to its place in the JSON, every chapter has its figures."""

import copy
import html as entities
import json
import re
from html.parser import HTMLParser

import pytest

from minidist.benchmarks.harness import columns, formats, results
from minidist.benchmarks.report import bars, card, chapters, page, printed, tables
from minidist.benchmarks.report.page import Notes
from minidist.benchmarks.report.pieces import Cell
from minidist.cli import commands
from tests.helpers import measured

MACHINES = {
    "made up": results.rounded(measured.everything()),
    "other": measured.machine(*measured.ladder(), cpu="Another"),
}


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


def rows(html):
    """Of each row that is a result: its machine, its place in the JSON, and its text."""
    for found in re.finditer(
        r'<tr id="([\w-]+)-result-(\d+)" data-note="([\w-]+)">(.*?)</tr>', html, flags=re.DOTALL
    ):
        slug = {"made-up": "made up"}.get(found[1], found[1])
        yield slug, int(found[2]), found[3], found[4]


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
    drawn = [attributes for tag, attributes in Elements(html).all if tag == "svg"]
    for attributes in drawn:
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"]) > 40
        assert "width" not in attributes
    # A colour that the page does not know would be black on black for half of the readers.
    assert not re.findall(r"#000[01]f\d", html)
    inside = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", inside)) <= {"#000000", "#ffffff"}
    defined = {*re.findall(r"(--[\w-]+):", html)}
    bars = [
        attributes for _, attributes in Elements(html).all if attributes.get("class", "").startswith("bars")
    ]
    assert all(each["role"] == "img" and len(each["aria-label"]) > 30 for each in bars)
    assert len(bars) > len(drawn) > 2
    assert set(re.findall(r"var\((--[\w-]+)\)", html)) <= defined


def test_the_page_is_for_light_and_dark_and_for_a_phone(html):
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    scrolling = [attributes for _, attributes in Elements(html).all if attributes.get("class") == "scroll"]
    assert scrolling
    assert all(attributes["tabindex"] == "0" for attributes in scrolling)


def test_what_it_was_given_is_escaped(html):
    assert "Made &lt;Up&gt; &amp; Co" in html
    assert "What <code>bench_launch</code> is &lt;about&gt;." in html


def test_every_result_has_a_row_with_its_figures(html):
    shown = {(slug, index): text for slug, index, _, text in rows(html)}
    assert set(shown) == {
        (slug, i) for slug, found in MACHINES.items() for i in range(len(found["benchmarks"]))
    }
    for (slug, index), text in shown.items():
        entry = MACHINES[slug]["benchmarks"][index]
        for column in columns.shown([entry]):
            cell = column.cell(entry)
            if cell and column != columns.PEER:  # which may stand in a heading
                assert page.prose(cell) in text, column.heading


def test_every_note_says_how_and_where(html):
    notes = dict(re.findall(r'<li id="(note-\d+)">(.*?)</li>', html, flags=re.DOTALL))
    for slug, index, name, _ in rows(html):
        entry, note = MACHINES[slug]["benchmarks"][index], entities.unescape(notes[name])
        for words in (
            f"<code>{slug}.json</code>, <code>benchmarks[{index}]</code>: <code>{entry['fullname']}</code>",
            f"of {entry['stats']['rounds']} rounds",
            formats.seconds(entry["stats"]["min"]),
            f"{MACHINES[slug]['runs'][entry['run']]['mode'].capitalize()} run of 2025-0",
            f"minidist bench {entry['suite'].removeprefix('bench_')}",
        ):
            assert words in note
    for words in (
        "commit 5d6e7f8 with changes",
        "In turns with torch DDP",
        "In turns with Layout(zero=9)",
        "Also in turns with the rung one_process in one process",
    ):
        assert words in html


def test_numbers_of_findings_lead_to_their_rows(html):
    opening = html[html.index('id="findings"') :].partition("</section>")[0]
    assert opening.count("<li>") == 7
    assert len(re.findall(r'<a class="figure" href="#([\w-]+)"', opening)) >= 8
    assert html.index('id="made-up"') < html.index('id="findings"') < html.index('id="made-up-strategies"')


def test_the_page_opens_with_this_machines_card_and_its_ladder(html):
    card = entities.unescape(html[html.index('id="made-up"') :].partition("</section>")[0])
    for words in (
        "Cores",
        "L2 1 MiB",
        "125 GFLOP/s on one core",
        "Fastest layout here",
        "1 python loops",
        "104 GFLOP/s",
    ):
        assert words in card
    assert "NumPy on one core, 100" in card
    assert "Matrix unit" not in card  # nothing was measured on one


def test_another_machine_is_folded_away_and_has_one_link(html):
    others = html[html.index('<section id="others">') :]
    assert re.search(r"<details><summary>Another, 2 cores, .*?</summary>", others)
    inside = others[others.index("<details>") :]
    for each in chapters.CHAPTERS:
        if f'id="other-{each.name}"' in html:
            assert f'id="other-{each.name}"' in inside
    contents = html[html.index("<nav") : html.index("</nav>")]
    assert ('href="#others"' in contents, "#other-" in contents) == (True, False)


def test_each_chapter_is_in_the_contents_and_has_its_figures(html):
    contents = html[html.index("<nav") : html.index("</nav>")]
    for chapter in chapters.CHAPTERS:
        assert f'href="#made-up-{chapter.name}"' in contents
    for name in (
        "strategies-table-0-ratios", "plain-bars", "zero-bars-0", "pipelines-gantt-0", "pipelines-gantt-1",
        "scaling-strong", "scaling-weak", "collectives-ratios", "ladders-cpu", "lessons-par",
    ):  # fmt: skip
        assert f'<figure id="made-up-{name}-figure">' in html
    assert html.count("<svg") == html.count('class="save"')


def test_figures_say_what_they_show(html):
    said = entities.unescape(" ".join(re.findall(r'aria-label="([^"]*)"', html)))
    for words in (
        "1 python loops 0.0100 GFLOP/s, n = 64",
        "ZeRO-1 45.0 MB (parameters 12.0 MB, gradients 12.0 MB, optimizer 12.0 MB, activations 9.00 MB)",
        "simulated: ranks wait for 20.0% of the step",
        "measured: ranks wait for 23.1% of the step",
        "data parallel 1.64 at 4",
        "tree 125%",
        "ZeRO-3 1.21 (1.16–1.26) times the time of torch fully_shard",
        "data parallel, overlap no difference beyond the spread (0.93–1.03)",
        "6 tile 104 of 125",
    ):
        assert words in said


def test_what_is_undecided_says_so_in_its_row(html):
    (row,) = [text for slug, index, _, text in rows(html) if (slug, index) == ("made up", 0)]
    assert '<td class="right undecided" data-value="0.98">0.98 (0.93–1.03) undecided</td>' in row


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("26.5 KB", 26500.0),
        ("3.14 ms", 0.00314),
        ("5.68 µs", 5.68e-6),
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


def test_a_result_is_where_its_figures_or_its_suite_say():
    found = chapters.by_chapter(tables.sections(MACHINES["made up"]))
    assert {name: sum(len(s.entries) for s in several) for name, several in found.items()} == {
        "strategies": 4, "plain": 3, "pipelines": 2, "scaling": 12, "collectives": 7, "ladders": 3,
        "lessons": 2, "rest": 1,
    }  # fmt: skip


def test_a_chart_without_a_measurement_is_the_simulation_alone():
    (entry, _) = measured.pipelines()
    both = bars.timeline(entry)
    del entry["extra_info"]["timeline"]["measured"]
    drawn = bars.timeline(entry)
    assert "measured" not in drawn.alt
    assert [row.name for row in drawn.rows] == ["rank 0", "rank 1"]
    assert len(both.rows) == 4
    last = [max(box.left + box.width for box in row.boxes) for row in both.rows]
    assert max(last) == pytest.approx(1.0)  # one time scale: what was measured took 1.1 of the simulation
    assert max(last[:2]) == pytest.approx(1 / 1.1)


def test_lessons_count_their_pars_and_draw_what_differs(html):
    assert "<p>1 of 2 solutions cost no more than par.</p>" in html
    assert bars.lessons(measured.lessons()[:1]) is None
    assert "ring" not in bars.lessons(measured.lessons()).alt


def test_markdown_is_for_a_readme():
    text = printed.markdown(MACHINES)
    assert text.startswith("## Made <Up> & Co, 2 cores")
    assert "- Vector unit: 125 GFLOP/s on one core" in text
    assert "1. On one core, matrix products climb from" in text
    assert "| ZeRO-1 | 105 ms | ±5% | 0.54 (0.49–0.59) | 13.0 MB |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert "full run of 2025-02-03, commit 5d6e7f8+" in text


def test_the_command_writes_markdown_to_stdout_or_to_a_file(capfd, tmp_path):
    results.save(MACHINES["made up"], tmp_path / "made-up.json")
    said = []
    for words in ([], ["--out", str(tmp_path / "part.md")], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            commands.main(["report", "--results", str(tmp_path), "--markdown", *words])
        said.append((ended.value.code, *capfd.readouterr()))
    (code, text, err), second, third = said
    assert (code, err) == (0, "")
    found = results.in_order(tmp_path)[1]  # marks what another machine measured
    assert text == (tmp_path / "part.md").read_text() == printed.markdown(found)
    assert second[0] == 0
    assert not (tmp_path / "report.html").exists()
    assert (third[0], third[2].count("\n")) == (2, 1)
    assert "--markdown and --json" in third[2]


def test_json_has_the_card_and_findings_with_what_they_rest_on():
    found = json.loads(json.dumps(printed.as_json(MACHINES)))
    assert len(found["findings"]) == 7
    assert found["findings"][2]["rests_on"][0]["name"] == "bench_strategies.py::test_gpt[ZeRO-1]"
    assert found["card"]["Fastest layout here"].startswith("data parallel, overlap on 2 ranks; 100 ms a step")


def test_the_training_ladder_is_a_table_that_opens_with_its_ideas(html):
    start = html.index('<section id="made-up-plain">')
    chapter = html[start : html.index("</section>", start)]
    headings = [entities.unescape(re.sub("<.*?>", "", each)) for each in re.findall(r"<th.*?</th>", chapter)]
    named = [heading for heading in headings if not heading.startswith(("one process", "ZeRO 9", "experts"))]
    assert ", ".join(named[:7]) == "rung, the one idea, lines, time, over one process, ratio of times, peer"
    assert "<details" not in chapter  # three rows or seventeen: it is not folded
    assert "1.42 (1.37–1.47)" in chapter


# What a reader would take for something else than it is.


def told(html, text):
    """The page's words in order, without its markup."""
    return text in re.sub(r"\s+", " ", entities.unescape(re.sub(r"<[^>]+>", " ", html)))


def test_communication_hidden_is_defined_and_blank_where_nothing_is_sent(html):
    rows = measured.strategies()[:2]
    rows[0]["extra_info"] |= {"hidden": 0.0, "comm_overlap": 0.98}  # the second: as older runs counted it
    rows[1]["extra_info"]["comm_overlap"] = 0.38
    shown = page.page({"m": measured.machine(*rows)})
    assert shown.count('data-key="extra_info.hidden"') == 1
    assert told(shown, "of the time with a message under way, the share in which a rank did not wait")
    assert told(shown, "So 0% is normal there.")
    assert "98%" not in shown
    assert "38%" not in shown
    assert "communication hidden" not in html[: html.index('id="notes"')]  # nothing measured, no column


def test_a_ratio_beside_two_times_says_that_it_is_a_median_of_pairs():
    """0.95 beside 154 ms and 153 ms: the medians come from different pairs."""
    one = measured.entry("strategies", "S", "s", 0.154, **measured.beside("torch", 0.154, 0.95))
    one["extra_info"]["peer_median"] = 0.153
    shown = page.page({"m": measured.machine(one)})
    assert told(
        shown, "A ratio is the median over pairs of turns; it may differ from the quotient of the medians."
    )
    assert "median over pairs" not in page.page({"m": measured.machine(*measured.lessons())})


def test_seconds_that_are_waiting_summed_over_ranks_are_called_that():
    (section,) = tables.sections(measured.machine(*measured.pipelines()))
    headings = [column.heading for column in section.columns()]
    assert tables.WAITING in headings
    assert "time" not in headings


def test_a_stage_that_counts_more_than_the_one_before_says_why(html):
    assert "counts more than the stage before" not in html
    stages = measured.strategies()[:2]
    two = copy.deepcopy(stages[1])
    two |= {"fullname": "x", "name": "x"}
    two["extra_info"] |= {"label": "ZeRO-2", "strategy": "ZeRO-2", "layout": "dp=2,zero=2"}
    two["extra_info"]["memory"] = {**two["extra_info"]["memory"], "gradients": 18 * 10**6}
    shown = page.page({"m": measured.machine(*stages, two)})
    assert told(
        shown, "ZeRO-2 counts more than the stage before: until they are sent, gradients wait in a bucket"
    )


def test_speed_over_one_rank_says_how_many_threads_that_has(html):
    """1.73 times as fast as one thread stands beside tables whose one process has two."""
    chapter = html[html.index('id="made-up-scaling"') :].partition("</section>")[0]
    assert "Every rank has one thread here" in chapter
    assert "compare with one process on all cores" in chapter
    strategies = html[html.index('id="made-up-strategies"') :].partition("</section>")[0]
    assert "in turns with one process that has all cores" in strategies


@pytest.mark.parametrize("unit", [False, True])
def test_the_matrix_unit_is_on_the_card_when_a_file_has_it(unit):
    entries = measured.ladder()
    for cores, rate in (("one", 2600.0), ("all", 5000.0)) if unit else ():
        extra = {
            "label": f"bf16, 1024, {cores} beside numpy.matmul",
            "gflops": rate,
            "arithmetic": "bfloat16",
        }
        extra |= {"percent_of_peak": 80.0, **({"series": "8 unit", "size": 1024} if cores == "one" else {})}
        beside = measured.beside("numpy.matmul", 0.01, 0.05)
        entries.append(measured.entry("cpu_matmul", "Rung 8", f"unit[{cores}]", 0.01, **extra, **beside))
    found = measured.machine(*entries)
    two = "3,250 bf16 GFLOP/s on one core; 6,250 bf16 GFLOP/s on 2 cores"
    assert card.facts(found)["Matrix unit"] == (two if unit else "")
    shown = page.page({"m": found})
    assert ("8 matrix unit, bf16, 2 cores" in shown) == unit
    assert told(shown, "The matrix unit reaches 5,000 GFLOP/s") == unit
    assert ("bfloat16 peak 3,250" in shown) == unit  # the roofline has a ceiling of its own


def test_a_machine_with_little_measured_has_a_card_too():
    only = measured.machine(measured.entry("launch", "Starting ranks", "no_op", 1e-4))
    assert [name for name, text in card.facts(only).items() if text] == ["Cores", "Caches"]
    shown = page.page({"m": only})
    assert "Run <code>minidist bench</code>" in shown
    well_formed(shown)
