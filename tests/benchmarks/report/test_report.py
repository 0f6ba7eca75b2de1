"""The report: what its cells say, terminals of any width, and a page that needs nothing else."""

import io
import itertools
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from minidist.benchmarks.harness import formats, results
from minidist.benchmarks.report import documents, figures, page, plots, sections, terminal
from tests.helpers import measured

COMPARED = {
    "peer": "numpy.matmul",
    "peer_median": 0.001,
    "peer_iqr": 0.0,
    "pair_ratio_q1": 1.9,
    "pair_ratio_q3": 2.2,
}


def entry(name, median=0.002, group="Products", suite="bench_x", run="2025-01-01T00:00:00+00:00", **extra):
    return {
        "suite": suite,
        "group": group,
        "name": f"test_{name}",
        "fullname": f"{suite}.py::test_{name}",
        "run": run,
        "stats": {"median": median, "iqr": 0.1 * median, "rounds": 9},
        "extra_info": extra,
    }


def machine_results(*entries):
    return {
        "schema": results.SCHEMA,
        "machine_info": {
            "cpu": "A <CPU> & more",
            "cores": 2,
            "memory_bytes": 2**34,
            "caches": {"L2": "1 MiB"},
            "gpus": None,
        },
        "runs": {
            "2025-01-01T00:00:00+00:00": {"mode": "quick", "software": measured.SOFTWARE, "commit": "1a2b3c4"}
        },
        "suites": {"bench_x": "One `import` after <another>.", "bench_y": "Other things."},
        "benchmarks": list(entries),
    }


EVERYTHING = machine_results(
    entry(
        "slow",
        0.2,
        label="slow, 64",
        series="1 slow",
        size=64,
        gflops=0.01,
        peer_gflops=50.0,
        ratio=20_000.0,
        **COMPARED,
    ),
    entry(
        "fast",
        0.002,
        label="fast, 64",
        series="2 fast",
        size=64,
        gflops=25.0,
        peer_gflops=50.0,
        ratio=2.0,
        **COMPARED,
    ),
    entry("faster", 0.002, label="fast, 128", series="2 fast", size=128, gflops=30.0, ratio=2.0, **COMPARED),
    entry("met", 0.004, "Goals", "bench_y", goal={"of": "median", "below": 0.010}),
    entry("missed", 2.0, "Goals", "bench_y", goal={"of": "ratio", "below": 1.5}, ratio=1.9, **COMPARED),
    entry(
        "steps",
        0.03,
        "Training",
        "bench_y",
        ratio=0.9,
        rows_per_s=12_345.0,
        bytes_per_step=483_328,
        **COMPARED,
    ),
    entry("plain", 0.03, "Nothing to compare", "bench_y"),
)


def printed(found, width):
    stream = io.StringIO()
    terminal.show_machine(Console(file=stream, width=width, color_system=None), "m", found)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.2e-9, "3.20 ns"),
        (5.68e-6, "5.68 µs"),
        (0.00123, "1.23 ms"),
        (0.999, "999 ms"),
        (1.0, "1.00 s"),
        (123.4, "123 s"),
    ],
)
def test_seconds(value, text):
    assert formats.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1200, "1.20 KB"),
        (483_328, "483 KB"),
        (2.5e6, "2.50 MB"),
        (3e9, "3.00 GB"),
    ],
)
def test_size(value, text):
    assert formats.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00973, "0.00973"),
        (0.1, "0.100"),
        (9.999, "10.0"),
        (28.34, "28.3"),
        (99.99, "100"),
        (10_349, "10,300"),
    ],
)
def test_number(value, text):
    assert formats.number(value) == text


def test_sections_follow_suites_and_groups():
    assert [(s.title, len(s.entries)) for s in sections.sections(EVERYTHING)] == [
        ("Products", 3),
        ("Goals", 2),
        ("Training", 1),
        ("Nothing to compare", 1),
    ]


def test_goals_are_judged():
    assert sections.goals(EVERYTHING) == (1, 2)
    text = printed(EVERYTHING, 120)
    assert "met, < 10.0 ms" in text
    assert "missed, < 1.5" in text
    assert "1 of 2 goals met" in text


def test_one_peer_stands_in_the_heading_and_two_in_a_column():
    headings = [column.heading for column in sections.sections(EVERYTHING)[0].columns()]
    assert "numpy.matmul" in headings
    assert "peer" not in headings
    two = machine_results(
        entry("a", ratio=2.0, **COMPARED), entry("b", ratio=2.0, **{**COMPARED, "peer": "another"})
    )
    headings = [column.heading for column in sections.sections(two)[0].columns()]
    assert "peer" in headings
    assert "numpy.matmul" not in headings


def test_a_hopeless_ratio_has_no_false_precision():
    text = printed(EVERYTHING, 120)
    assert "20,000" in text
    assert "2.00 (1.90–2.20)" in text


def test_a_difference_has_its_sign_and_may_be_the_goal():
    slower, faster = (
        entry(
            name,
            seconds,
            ratio=1.0,
            beyond_peer=beyond,
            goal={"of": "beyond_peer", "below": 15e-6},
            **COMPARED,
        )
        for name, seconds, beyond in (("slower", 30e-6, 22e-6), ("faster", 6e-6, -2e-6))
    )
    found = machine_results(slower, faster)
    text = printed(found, 120)
    assert "minus" in text
    assert "+22.0 µs" in text
    assert "-2.00 µs" in text
    assert "met, < 15.0 µs" in text
    assert sections.goals(found) == (1, 2)
    assert "faster at -0.13 times its limit" in plots.plot(sections.sections(found)[0], "x").alt


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.5, 2e4, [1, 10, 100, 1000, 10_000]),
        (20, 80, [20, 50]),
        (25e4, 75e4, [300_000, 500_000, 700_000]),
        (900, 1200, [1000]),
    ],
)
def test_a_logarithmic_axis_has_round_numbers(low, high, ticks):
    assert figures.round_ticks(low, high) == ticks


@pytest.mark.parametrize("width", [60, *range(78, 90), 100, 200])
def test_a_terminal_of_any_width_cuts_no_cell(width):
    text = printed(EVERYTHING, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "faster" not in text  # the label, not the test's name
    assert "fast, 128" in text


def test_json_has_every_figure():
    found = documents.machine_as_json(EVERYTHING)
    assert found["goals"] == {"met": 1, "of": 2}
    row = found["sections"][0]["rows"][1]
    assert (row["label"], row["median"], row["gflops"], row["mode"]) == ("fast, 64", 0.002, 25.0, "quick")


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


@pytest.fixture(scope="module")
def html():
    return page.page({"this": EVERYTHING, "other": EVERYTHING})


def test_page_needs_nothing_from_elsewhere(html):
    for tag, attributes in Elements(html).all:
        assert tag not in ("img", "iframe", "object")
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in html  # a browser would refuse it, too


def test_page_has_unique_ids_and_all_that_are_referred_to(html):
    elements = Elements(html).all
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    referred = re.findall(r'(?:href="#|url\(#|aria-labelledby=")([\w-]+)', html)
    assert referred
    assert set(referred) <= set(ids)


def test_page_figures_are_described_and_take_the_pages_colours(html):
    figures = [attributes for tag, attributes in Elements(html).all if tag == "svg"]
    assert len(figures) == 1 + 2 * 2  # the answer; of each machine products and goals, as one row needs none
    for attributes in figures:
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"]) > 40
        assert "width" not in attributes
    assert "fast reaches 30.0" in html
    # A colour that the page does not know would be black on black for half of the readers.
    assert not re.findall(r"#000[01]f\d", html)
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= {"#000000", "#ffffff"}
    defined = set(re.findall(r"(--[\w-]+):", html))
    assert set(re.findall(r"var\((--[\w-]+)\)", html)) <= defined


def test_page_is_for_light_and_dark_and_for_a_phone(html):
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    scrolling = [attributes for tag, attributes in Elements(html).all if attributes.get("class") == "scroll"]
    assert scrolling
    assert all(attributes["tabindex"] == "0" for attributes in scrolling)


def test_page_escapes_what_it_was_given(html):
    assert "A &lt;CPU&gt; &amp; more" in html
    assert "One <code>import</code> after &lt;another&gt;." in html


def test_page_is_the_same_each_time(html):
    assert page.page({"this": EVERYTHING, "other": EVERYTHING}) == html


def test_names_at_the_ends_of_lines_keep_apart():
    crowded = machine_results(
        *(
            entry(f"s{i}", series=f"{i} line", size=64, gflops=10.0 + i / 100, ratio=2.0, **COMPARED)
            for i in range(6)
        )
    )
    crowded["benchmarks"].append(entry("far", series="far", size=64, gflops=0.01, ratio=2.0, **COMPARED))
    (section,) = sections.sections(crowded)
    drawn = plots.plot(section, "crowded").svg
    heights = sorted(
        float(found[1]) for found in re.finditer(r'<text [^>]*?y="([\d.]+)"[^>]*>\d line</text>', drawn)
    )
    assert len(heights) == 6
    assert min(b - a for a, b in itertools.pairwise(heights)) > 8


def test_quick_and_full_results_stand_beside_each_other_with_their_dates():
    found = machine_results(entry("a"), entry("b"))
    assert "run" not in [column.heading for column in sections.sections(found)[0].columns()]
    found["runs"]["2026-02-03T04:05:06+00:00"] = {**next(iter(found["runs"].values())), "mode": "full"}
    found["benchmarks"][1]["run"] = "2026-02-03T04:05:06+00:00"
    text = printed(found, 120)
    assert "full, 2026-02-03" in text
    assert "quick, " in text


def test_numpys_kernel_is_shown_beside_its_figures():
    found = machine_results(entry("a", ratio=2.0, **COMPARED))
    (run,) = found["runs"].values()
    run["software"] = {**run["software"], "blas": {"name": "openblas", "architecture": "Haswell"}}
    assert "NumPy on openblas's Haswell kernel" in " ".join(printed(found, 140).split())
    run["software"]["blas"]["chosen_by"] = "OPENBLAS_CORETYPE"
    assert "kernel, which OPENBLAS_CORETYPE chose" in " ".join(printed(found, 140).split())
