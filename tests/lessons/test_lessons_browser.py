"""Lessons in JupyterLab, in a real browser: all cells run, figures and animations show, checks pass.

Playwright drives a Chromium that is installed; none is downloaded. MINIDIST_SCREENSHOTS names a folder for
pictures of each lesson in both themes, to be looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lessons.test_lessons import LESSONS, lesson_of, solved

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from checks.support import notebooks

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

STEMS = [source.stem for source in notebooks.sources() if source.stem[:2] in ("01", "08", "14")]
START, RUN = 90, 300  # seconds for JupyterLab to start, and for a lesson to run
TOKEN = "lessons"
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are there, too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """JupyterLab over a copy of the lessons, with the exercises solved: its address, and its settings."""
    place = tmp_path_factory.mktemp("lab") / "lessons"
    shutil.copytree(LESSONS, place, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    import nbformat

    for stem in STEMS:
        nbformat.write(solved(notebooks.notebook(LESSONS / f"{stem}.py"), stem), place / f"{stem}.ipynb")
    settings = place.parent / "settings"
    write_settings(settings, "JupyterLab Light")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "-y"]
    command += [f"--port={port}", "--ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}"]
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(place.parent / "workspaces"),
        "JUPYTER_RUNTIME_DIR": str(place.parent / "runtime"),
        "MINIDIST_LESSONS_PROGRESS": str(place.parent / "progress.json"),
    }
    with (place.parent / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
        address = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api", timeout=5):
                    break
                assert server.poll() is None, (place.parent / "log").read_text()
                assert time.monotonic() < deadline, "JupyterLab did not start"
                time.sleep(0.3)
            yield address, settings
        finally:
            server.terminate()
            server.wait(20)


def write_settings(folder: Path, theme: str) -> None:
    for name, values in {**SETTINGS, "apputils-extension/themes": {"theme": theme}}.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def picture(page: Any, name: str) -> None:
    if folder := os.environ.get("MINIDIST_SCREENSHOTS"):
        for index, figure in enumerate(page.locator("figure").all()):
            figure.scroll_into_view_if_needed()
            page.screenshot(path=str(Path(folder) / f"{name}-{index}.png"))


@pytest.mark.parametrize("stem", STEMS)
def test_a_lesson_runs_in_jupyterlab(lab: tuple[str, Path], browser: Any, stem: str) -> None:
    address, settings = lab
    write_settings(settings, "JupyterLab Dark" if stem.startswith("01") else "JupyterLab Light")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    try:
        page.goto(f"{address}/lab/tree/{stem}.ipynb?token={TOKEN}&reset", timeout=START * 1000)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=START * 1000)
        # Before that, Run asks in a dialog for a kernel.
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=START * 1000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        done = """() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
            .every(each => /\\[\\d+\\]/.test(each.textContent))
            || document.querySelector('[data-mime-type="application/vnd.jupyter.error"]')"""
        page.wait_for_function(done, timeout=RUN * 1000, polling=500)
        errors = page.locator('[data-mime-type="application/vnd.jupyter.error"]').all_inner_texts()
        picture(page, stem)
        assert not errors
        shown = "\n".join(page.locator(".jp-OutputArea-output").all_inner_texts())
        assert shown.count("Right") >= len(lesson_of(stem).exercises)
        figures = page.locator("figure")
        assert figures.count() >= 3
        assert all(figure.locator("svg").first.bounding_box()["width"] > 300 for figure in figures.all())
        assert "You are here" in figures.first.inner_text()
        if page.get_by_label("One step on").count():
            moves(page)
    finally:
        page.close()


def moves(page: Any) -> None:
    """The first animation goes a step on, and plays."""
    words = page.locator("figure span[aria-live]").first
    before = words.inner_text()
    page.get_by_label("One step on").first.click()
    assert words.inner_text() != before
    page.get_by_label("Play or pause").first.click()
    page.wait_for_function(
        "before => document.querySelector('figure span[aria-live]').textContent != before",
        arg=words.inner_text(),
        timeout=10_000,
    )
