"""Make the site's pages that have no file in docs/ (sources, lessons, the API), and put pictures into others.

A page links to files of the repository as it does on disk (`../minidist/plain/buckets.py`). The site has a
page for each such file and folder, and the links lead there. A picture stands where a page has a comment like
`<!-- picture: ring.ring_animation -->`, which names a function of lessons/checks/pictures. It takes the place
of the image below the comment, a still of docs/pictures.py that code hosts show. With `playing` instead of
`picture` it begins to move by itself. `<!-- ladder -->` stands for what the committed measurements say.

The playground's page gets Python itself (Pyodide) in a script, since a page that is a file may fetch no file.
"""

from __future__ import annotations

import ast
import base64
import gzip
import importlib
import json
import os
import posixpath
import re
import runpy
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXECUTED = ROOT / "build" / "lessons"
"""Where docs/run_lessons.py leaves the lessons with their outputs; without it they are shown without."""
PYODIDE = ROOT / "build" / "node_modules" / "pyodide"
"""Where `make site` installs the npm package of that name."""
EMBEDDED = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
ASKED = ("playground*.py", "puzzle_*.py")
"""The files of docs/ that pages ask in the browser."""
LINK = re.compile(r"(?<=\]\()(?!http|#)([^)#\s]+)(#[^)]*)?(?=\))")
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
"""Begins a page of a source: a search that shows whole files hides the pages that explain them."""
API = {"minidist": "", "comm": "comm.", "schedules": "parallel.schedules.", "kernels": "kernels."}
"""The reference's pages, and where in minidist their names are."""
WORDS = {6: "six", 7: "seven", 8: "eight", 9: "nine"}
PLAYING = """<script>
(() => { // move at once, and again and again, unless the reader wants no motion or has paused it
  const play = document.querySelector('[aria-label="Play or pause"]');
  const range = play.parentElement.querySelector("input");
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const again = () => { if (play.textContent === "Play" && range.value === range.max) play.click(); };
  new MutationObserver(() => setTimeout(again, 4000)).observe(play, { childList: true });
  play.click();
})();
</script>"""
"""Follows a picture that plays by itself."""
REREAD = {"rung": "rung()"}
"""What docs/reference.py calls a function that a module of the same name hides."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of what docs/ links to, and the API's."""
    wanted = [path for page in files.documentation_pages() for path in links(DOCS / page.src_uri)]
    wanted += [path.with_suffix(".ipynb") for path in sorted(ROOT.glob("lessons/[0-9]*.py"))]
    known: set[Path] = set()
    while wanted:
        path = wanted.pop()
        if path in known or DOCS in path.parents or path == ROOT / "README.md" or not path.exists():
            continue
        known.add(path)
        if path.suffix in (".md", ".ipynb"):
            wanted += links(path)
        place = address(path)
        unsearched = UNSEARCHED if place.startswith("source/") else ""
        files.append(File.generated(config, place, content=unsearched + text(path)))
    for page, place in API.items():
        module = f"minidist.{place}".rstrip(".")
        names = sorted({*importlib.import_module(module).__all__} - {*API}, key=str.lower)
        content = "".join(f"::: {module}.{REREAD.get(name, name)}\n\n" for name in names)
        files.append(File.generated(config, f"api/{page}.md", content=f"# {module}\n\n{content}"))
    files.append(File.generated(config, "report.html", content=report()))
    if PYODIDE.exists():
        files.append(File.generated(config, "assets/playground-python.js", content=python_script()))
    return files


def report() -> str:
    """The benchmarks' page, with every machine in benchmarks/results; a reader's own is none of them."""
    from minidist.benchmarks.harness import results
    from minidist.benchmarks.report.page import page

    contents = '<nav aria-label="Contents"><ol>'
    html = page(results.load_all(ROOT / "benchmarks" / "results"))
    return html.replace(contents, f'{contents}<li><a href="index.html">To the documentation</a></li>', 1)


def address(path: Path) -> str:
    """The page of a file or a folder of the repository."""
    place = path.relative_to(ROOT).as_posix()
    if place == "README.md":
        return "index.md"
    if path.is_dir():
        return f"source/{place}/index.md"
    return place.replace(".ipynb", ".md") if path.suffix in (".md", ".ipynb") else f"source/{place}.md"


def text(path: Path) -> str:
    """The page of a file or a folder as Markdown."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return path.read_text()
    if path.suffix == ".ipynb":
        blank = json.loads(path.read_text())["cells"]
        ran = EXECUTED / path.name  # its cells hold the solutions
        solved = json.loads(ran.read_text())["cells"] if ran.exists() else blank
        if len(solved) != len(blank):
            solved = blank  # the lesson has changed since it ran
        return "\n\n".join(
            cell_text(cell, done.get("outputs", [])) for cell, done in zip(blank, solved, strict=True)
        )
    if path.is_file():
        return f'# {name}\n\n````{path.suffix[1:] or "text"} linenums="1"\n{path.read_text()}\n````\n'
    package = path / "__init__.py"
    about = ast.get_docstring(ast.parse(package.read_text())) if package.exists() else ""
    entries = sorted(each.name + "/" * each.is_dir() for each in path.iterdir() if each.name[0] not in "._")
    return f"# {name}/\n\n```text\n{about or ''}\n```\n\n" + "".join(f"- `{entry}`\n" for entry in entries)


def cell_text(cell: dict[str, Any], outputs: list[dict[str, Any]]) -> str:
    """A notebook's cell with these outputs, as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    parts = [f"````python\n{source}\n````"]
    for streams, group in groupby(outputs, key=lambda each: each["output_type"] == "stream"):
        each = [*group]
        if streams:  # what ranks print line by line is one text
            each = [{"text": ["".join(one["text"]) for one in each]}]
        parts += map(output_text, each)
    return "\n\n".join(filter(None, parts))


def output_text(output: dict[str, Any]) -> str:
    """An output of a cell, as Markdown."""
    data = output.get("data", {})
    if "text/html" in data:
        return f"<div>{''.join(data['text/html'])}</div>"
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">'
    words = "".join(output.get("text", data.get("text/plain", output.get("traceback", []))))
    return f"````text\n{re.sub(chr(27) + r'.*?m', '', words)}\n````" if words else ""


def links(page: Path) -> list[Path]:
    """The files and folders that a page links to."""
    return [(page.parent / target).resolve() for target, _ in LINK.findall(page.read_text())]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links to the pages of what they name; make the tables of schedules and policies anew."""
    place = page.file.src_uri
    markdown = runpy.run_path(os.fspath(DOCS / "tables.py"))["renewed"](place, markdown)
    source = ROOT / place if page.file.generated_by else DOCS / place

    def lead(link: re.Match[str]) -> str:
        path = (source.parent / link[1]).resolve()
        inside = path.relative_to(DOCS).as_posix() if DOCS in path.parents else address(path)
        return posixpath.relpath(inside, posixpath.dirname(place)) + (link[2] or "")

    return LINK.sub(lead, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the pictures and the playground in."""
    html = re.sub(r"<!-- ((?:playground|puzzle_)\w*) -->", lambda found: playground(found[1]), html)
    html = html.replace("<!-- ladder -->", ladder())
    moving = r"<!-- (picture|playing): (\w+)\.(\w+) -->\s*<p><img [^>]*></p>"
    return re.sub(
        moving, lambda found: picture(*found.groups()[1:]) + PLAYING * (found[1] == "playing"), html
    )


def ladder() -> str:
    """From the first rung of the CPU's ladder to the last, as the newest committed measurements have it."""
    from minidist.benchmarks.harness import describe_machine as machine
    from minidist.benchmarks.harness import results
    from minidist.kernels import CPU_LADDER

    names = [rung.name for rung in CPU_LADDER if "float64" in rung.dtypes]  # one more trades digits for speed
    found = []
    for each in results.load_all(ROOT / "benchmarks" / "results").values():
        speeds: dict[str, float] = {}
        for row in each["benchmarks"]:
            name = str(row.get("extra_info", {}).get("label", "")).partition(",")[0]
            if name in names and "gflops" in row["extra_info"]:
                speeds[name] = max(speeds.get(name, 0.0), row["extra_info"]["gflops"])
        if {names[0], names[-1]} <= {*speeds}:
            ends = speeds[names[0]], speeds[names[-1]]
            found.append((max(each["runs"]), *ends, machine.title(each["machine_info"])))
    if not found:
        return ""
    _, first, last, where = max(found)
    return (
        f'<p class="ladder"><strong>From {first:.1g} to {last:.0f} GFLOP/s in {WORDS[len(names)]} '
        "files.</strong> "
        f'<a href="report.html">Measured</a> on {where}; <code>make bench</code> measures yours.</p>'
    )


def picture(module: str, function: str) -> str:
    """The HTML that a function of lessons/checks/pictures displays in a notebook."""
    shown: list[Any] = []
    with (
        mock.patch("IPython.display.display", shown.append),
        mock.patch.object(sys, "path", [os.fspath(ROOT / "lessons"), *sys.path]),
    ):
        getattr(importlib.import_module(f"checks.pictures.{module}"), function)()
    return "".join(each.data for each in shown)


def playground(name: str, pyodide: Path = PYODIDE) -> str:
    """A form of the playground or of a puzzle; or a sentence, where the npm package is missing."""
    if pyodide.exists():
        return (DOCS / f"{name}.html").read_text()
    return (
        "<p><strong>What runs here is missing:</strong> <code>make site</code> could not install the npm "
        "package <code>pyodide</code>, which runs Python in a browser.</p>"
    )


def python_script() -> str:
    """A script that defines EMBEDDED: the files of Pyodide, each as base64 of its gzip.

    Among them is sources.json: the text of ASKED, and of each file of minidist that they import.
    """
    asked = [path for pattern in ASKED for path in sorted(DOCS.glob(pattern))]
    program = (
        f"import json, sys, {', '.join(path.stem for path in asked)}; "
        "print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'minidist']))"
    )
    paths = os.pathsep.join([os.fspath(ROOT), os.fspath(DOCS)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
        capture_output=True,
        text=True,
    )
    sources = {
        Path(file).relative_to(ROOT).as_posix(): Path(file).read_text() for file in json.loads(done.stdout)
    }
    sources |= {file.name: file.read_text() for file in asked}
    contents = {name: (PYODIDE / name).read_bytes() for name in EMBEDDED}
    contents["sources.json"] = json.dumps(sources).encode()
    packed = {
        name: base64.b64encode(gzip.compress(each, mtime=0)).decode() for name, each in contents.items()
    }
    return f"const EMBEDDED = {json.dumps(packed)};\n"
