"""The page of `ppas trace show --html`: whole, offline, with nothing of a trace's names run or left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.look import look
from ppas_core.defaults import published
from ppas_core.sim.profile import load_profile
from reports.trace_page import render, write_trace_page
from search_spaces.space import load_space
from traces.describe import describe
from traces.format import Trace, TraceRequest, write_trace
from traces.generate import rag_bursts

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><img src=x onerror=alert(1)>"


def seen(trace: Trace) -> dict[str, object]:
    found = look(trace, load_profile("rtx5090-qwen2.5-3b"), published("ppas"), load_space("ppas-plus"))
    return {**describe(trace), "predicted": found}


def test_the_page_says_what_show_says_and_that_it_is_simulated() -> None:
    page = render(seen(rag_bursts(0.4, 0)))
    assert "Pressure is never reached from n_th = 2 on" in page
    assert "Simulated, not measured on a server" in page
    assert "The load is moderate" in page
    assert "On rtx5090-qwen2.5-3b, under 2/16384/2048 prefill" in page
    assert page.count('class="card figure"') == 5
    assert len(page) < 6e6


def test_a_name_is_text_and_never_markup() -> None:
    trace = Trace(HOSTILE, (TraceRequest(0.0, 10, 2),), regime=HOSTILE)
    assert HOSTILE not in render(seen(trace))
    assert "&lt;/script&gt;&lt;img" in render(seen(trace))


def test_a_trace_that_does_not_fit_still_has_a_page() -> None:
    page = render(seen(Trace("long", (TraceRequest(0.0, 100_000, 2),))))
    assert "It does not fit: no request can be served." in page
    assert "No request of this trace fits the profile." in page


def test_the_command_writes_it_and_wants_a_profile_for_it(tmp_path: Path) -> None:
    file, page = tmp_path / "t.jsonl", tmp_path / "t.html"
    write_trace(rag_bursts(1.2, 0), file)
    show = ["trace", "show", str(file), "--html", str(page)]
    assert CliRunner().invoke(app, show).exit_code == 2
    assert not page.exists()
    done = CliRunner().invoke(app, [*show, "--profile", "rtx5090-qwen2.5-3b"])
    assert done.exit_code == 0, done.output
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; scripts/install_browser.sh installs one")
def test_a_browser_draws_every_figure_without_a_complaint_or_a_request(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
    path = tmp_path / "page.html"
    write_trace_page(seen(rag_bursts(1.2, 0)), path)
    complaints: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for width in (1440, 390):
            page = browser.new_page(viewport={"width": width, "height": 1000})
            page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-drawn=true]", timeout=60_000)
            assert page.locator("figure .js-plotly-plot .main-svg:first-of-type").count() == 5
            assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
            folder = Path(__file__).parents[2] / "dist" / "screenshots"
            folder.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=folder / f"trace-{width}.png", full_page=True)
        browser.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
