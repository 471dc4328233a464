"""The report in a real Chromium, from the file system and without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import odd_studies
import pytest
import sample_study

from reports.compare import write_comparison
from reports.html import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="they need axe-playwright-python too")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
FIGURES = 11
BEYOND = (
    "(id => { const box = document.querySelector(`[data-table=${id}] .scroll`), edge = box.getBoundingClientRect().right;"
    " return [...box.querySelectorAll('thead th')].filter(h => h.getBoundingClientRect().right > edge + 12).length; })"
)
TOUCHING = (
    "[...document.querySelectorAll('section > * + *, .two > * + *')].filter(e => e.getClientRects().length &&"
    " e.previousElementSibling.getClientRects().length && !e.matches('.section-lead') && e.matches('.card, .two, .one')"
    " && e.getBoundingClientRect().left === e.previousElementSibling.getBoundingClientRect().left"
    " && e.getBoundingClientRect().top - e.previousElementSibling.getBoundingClientRect().bottom < 12).length"
)
SWITCHED_TWICE = (
    "new Promise(done => { const button = document.querySelector('button.theme'),"
    " look = () => [...document.querySelectorAll('figure .xtitle')].map(title => title.style.fill), before = look();"
    " const again = () => { if (look().at(-2) === before.at(-2)) setTimeout(again); else { button.click(); wait(); } };"
    " const wait = () => { if (document.documentElement.dataset.drawn) done([before, look()]); else setTimeout(wait); };"
    " button.click(); again(); })"
)
DRAWN = "figure .js-plotly-plot .main-svg:first-of-type"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; scripts/install_browser.sh installs one"),
]


SCREENSHOTS = Path(__file__).parents[2] / "dist" / "screenshots"
"""Where the pictures of a run stay, to be looked at; git ignores the folder."""


def keep(page, name: str) -> None:
    """A picture of the whole page as it is now."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


class Opened:
    """A page with everything that it complained of and everything that it asked for."""

    def __init__(self, page, path: Path) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda r: self.requests.append(r.url))
        page.goto(path.as_uri())
        self.wait()

    def wait(self) -> None:
        """Until every figure is drawn as the page now is: it notices another width or theme at its next frame."""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.page.wait_for_selector("html[data-drawn=true]", timeout=60_000)

    def overflow(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def until(page, condition: str) -> None:
    """Waits for a JavaScript condition. Playwright's own wait evaluates text, which the page's policy forbids."""
    for _ in range(300):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(sample_study.build(num_search=24, num_random=12), path)
    return path


@pytest.fixture(scope="module")
def live_report(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("live") / "report.html"
    write_report(odd_studies.live(warnings=["the reference drifted by up to 8.4 %"]), path)
    return path


@pytest.fixture(scope="module")
def opened(browser, report) -> Iterator[Opened]:
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    yield Opened(page, report)
    page.close()


def test_every_figure_draws_without_a_complaint_or_a_request(opened, report):
    assert opened.page.locator(DRAWN).count() == FIGURES
    traces = opened.page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map(p =>"
        " p.querySelectorAll('.scatterlayer .trace, .barlayer .trace, .heatmaplayer image').length)"
    )
    assert len(traces) == FIGURES
    assert min(traces) > 0
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report.as_uri()]


def test_the_page_fits_a_phone_and_a_desktop_in_both_themes(browser, report):
    page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme="dark")
    opened = Opened(page, report)
    for width, scheme in ((390, "dark"), (390, "light"), (1440, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        until(
            page,
            "[...document.querySelectorAll('.js-plotly-plot .main-svg')].every(s =>"
            " s.getBoundingClientRect().right <= innerWidth + 1)",
        )
        opened.wait()
        assert opened.overflow() == 0
        keep(page, f"report-{width}-{scheme}")
    assert opened.complaints == []
    page.close()


@pytest.mark.parametrize("kind", ["live", "simulated", "compared"])
def test_axe_finds_nothing_serious_on_any_kind_of_report(browser, tmp_path, kind):
    if kind == "compared":
        write_comparison([odd_studies.foretold(), odd_studies.static_exported()], tmp_path / "report.html")
    else:
        write_report(
            odd_studies.foretold() if kind == "live" else odd_studies.static_exported(), tmp_path / "report.html"
        )
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    opened = Opened(page, tmp_path / "report.html")
    looks = ((1440, "light"), (390, "dark"), (1440, "dark"), (390, "light"))
    for width, scheme in looks if kind == "live" else looks[:2]:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        opened.wait()
        found = axe.Axe().run(page).response["violations"]
        grave = [v for v in found if v["impact"] in ("serious", "critical")]
        told = [(v["id"], v["help"], [node["html"][:120] for node in v["nodes"][:3]]) for v in grave]
        assert told == [], (width, scheme)
        assert opened.overflow() == 0
        assert page.evaluate(TOUCHING) == 0
        keep(page, f"{kind}-{width}-{scheme}")
    assert opened.complaints == []
    page.close()


def test_axe_would_find_a_text_without_contrast(opened):
    """The check above can fail: axe runs under the page's security policy and sees its colours."""
    opened.page.evaluate("document.querySelector('.section-lead').style.color = '#e3e6ea'")
    found = axe.Axe().run(opened.page).response["violations"]
    opened.page.evaluate("document.querySelector('.section-lead').style.color = ''")
    assert [v["id"] for v in found if v["impact"] == "serious"] == ["color-contrast"]


def test_a_live_report_draws_the_drift_and_says_measured(browser, live_report):
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    opened = Opened(page, live_report)
    assert page.locator(DRAWN).count() == FIGURES + 1
    assert page.locator("#fig-drift .scatterlayer .point").count() == 3
    assert {t.lower() for t in page.locator(".badge").all_inner_texts()} == {"measured"}
    page.locator("nav a", has_text="Quality").click()
    until(page, "document.querySelector('#quality').getBoundingClientRect().top < 200")
    assert opened.complaints == []
    page.close()


def test_a_simulator_beside_a_live_study_draws_its_forecast_its_maps_and_other_rates(browser, tmp_path):
    study = odd_studies.foretold()
    write_report(study, tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    opened = Opened(page, tmp_path / "report.html")
    assert page.locator(DRAWN).count() == FIGURES + 4
    ok = [t for t in study.trials if t.state == "ok"]
    assert page.locator("#fig-prediction .scatterlayer .point").count() == len(ok) + 1  # and the ring about the pick
    page.locator("#fig-maps input[type=radio]").nth(1).check(force=True)
    until(page, "document.querySelector('#fig-maps .heatmaplayer image, #fig-maps .heatmaplayer path') !== null")
    assert page.locator("#fig-robustness .scatterlayer .trace").count() == 3
    assert page.locator("#fig-front .legend button", has_text="Stopped early").count() == 1
    assert opened.complaints == []
    page.close()


def test_the_time_line_shows_the_policy_act_and_its_close_up_single_steps(opened):
    page = opened.page
    chart = page.locator("#fig-timeline")
    chart.scroll_into_view_if_needed()
    titles = page.locator("#fig-timeline .annotation-text").all_text_contents()
    assert [title.split(" ")[0] for title in titles] == ["Tuned", "Paper"]
    assert "budget cut in" in titles[0]
    before = page.evaluate("document.querySelector('#fig-timeline .js-plotly-plot').layout.xaxis.range.join()")
    chart.locator(".switch input").nth(3).check(force=True)
    until(page, f"document.querySelector('#fig-timeline .js-plotly-plot').layout.xaxis.range.join() !== '{before}'")
    box = page.evaluate(
        "(() => { const p = document.querySelector('#fig-timeline .js-plotly-plot'), l = p._fullLayout,"
        " b = p.getBoundingClientRect(), t = p._fullData.find(d => d.yaxis === 'y3' && d.marker && d.marker.opacity === 0);"
        " const x = t.x[Math.floor(t.x.length / 2)];"
        " return [b.left + l.xaxis._offset + l.xaxis.d2p(x), b.top + l.yaxis3._offset + l.yaxis3._length / 2]; })()"
    )
    page.mouse.move(box[0] - 4, box[1])
    page.mouse.move(box[0], box[1], steps=3)
    hover = page.locator("#fig-timeline .hoverlayer .hovertext").first
    hover.wait_for()
    text = page.locator("#fig-timeline .hoverlayer").text_content()
    assert text.count("running, ") >= 1  # the other lane answers, too, where it has a step near the pointer
    assert "Tuned · " in text
    assert "Budget" in text
    cut = chart.locator(".legend button", has_text="Budget cut: prefill pressure")
    count = "[...document.querySelectorAll('#fig-timeline .js-plotly-plot')][0]._fullData.filter(t => t.visible === true).length"
    shown = page.evaluate(count)
    cut.click()
    until(page, f"({count}) === {shown} - 4")  # allowed and used, in both lanes
    cut.click()
    until(page, f"({count}) === {shown}")
    assert opened.complaints == []


def test_the_front_s_ellipses_and_the_chance_in_the_table_agree(opened):
    page = opened.page
    assert page.locator("#fig-front .legend button", has_text="Pick, 95% interval").count() == 1
    head = page.locator("#table-trials thead th", has_text="On the front")
    head.locator("button").click()
    head.locator("button").click()
    first = page.locator("#table-trials tbody tr").first.locator("td").nth(4).inner_text()
    assert first.endswith("%")
    assert int(first.replace("●", "").replace("%", "").strip()) > 20


def test_several_studies_draw_on_one_page_and_their_choices_work(browser, tmp_path):
    write_comparison(
        [sample_study.build(num_search=12, num_random=0), odd_studies.foretold(), odd_studies.hostile()],
        tmp_path / "compare.html",
    )
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    opened = Opened(page, tmp_path / "compare.html")
    assert page.locator(DRAWN).count() == 4
    assert page.locator("#fig-effects .scatterlayer .point").count() == 3
    page.locator("#fig-effects input[type=radio]").nth(1).check(force=True)
    page.locator("#fig-effects label", has_text="Mean TPOT").locator("input").check(force=True)
    until(page, "document.querySelector('#fig-effects .xtitle').textContent === 'Gain in mean TPOT, %'")
    assert page.locator(".study").count() == 3
    assert page.evaluate("window.pwned") is None
    page.set_viewport_size({"width": 390, "height": 900})
    opened.wait()
    assert opened.overflow() == 0
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [(tmp_path / "compare.html").as_uri()]
    page.close()


def test_no_column_hides_beyond_the_edge_without_a_word(browser, report):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    Opened(page, report)
    for table in ("comparisons", "regimes", "trials"):
        assert page.evaluate(f"{BEYOND}('{table}')") == 0, table
        assert not page.locator(f"[data-table={table}] .more").is_visible()
    below, box = page.locator("[data-table=trials] .below"), page.locator("[data-table=trials] .scroll")
    assert below.is_visible(), "rows that lie below the edge are told of as well"
    box.evaluate("box => box.scrollTo(0, box.scrollHeight)")
    below.wait_for(state="hidden")
    page.set_viewport_size({"width": 390, "height": 900})
    assert box.evaluate("box => getComputedStyle(box).maxHeight") != "none"
    short = page.locator("[data-table=settings] .scroll, [data-table=comparisons] .scroll")
    assert short.evaluate_all("boxes => boxes.every(box => box.scrollHeight <= box.clientHeight + 1)")
    hint = page.locator("[data-table=regimes] .more")
    hint.wait_for()
    assert hint.inner_text() == f"{page.evaluate(BEYOND + '(`regimes`)')} more columns: scroll sideways →"
    page.locator("[data-table=regimes] .scroll").evaluate("box => box.scrollTo(box.scrollWidth, 0)")
    hint.wait_for(state="hidden")
    page.close()


def test_hovering_over_a_trial_tells_its_setting_and_its_gains(opened):
    hover_over_the_reference(opened.page)
    text = opened.page.locator("#fig-front .hoverlayer .hovertext").text_content()
    assert "2/16384/2048 prefill" in text
    assert "mean end-to-end latency: 0.0 %" in text
    assert "steps: max" in text


def test_clicking_a_trial_pins_it_and_marks_its_row(opened):
    hover_over_the_reference(opened.page)
    opened.page.mouse.down()
    opened.page.mouse.up()
    pinned = opened.page.locator("#fig-front .pinned dl")
    pinned.wait_for()
    assert "2/16384/2048 prefill" in pinned.inner_text()
    assert opened.page.locator("tr.marked").get_attribute("id") == "trial-0"


def test_a_choice_redraws_the_figure_by_mouse_and_by_keyboard(opened):
    title = opened.page.locator("#fig-load .ytitle")
    assert title.text_content() == "Mean end-to-end latency, s"
    opened.page.locator("#fig-load select").select_option(label="Mean TPOT")
    until(opened.page, "document.querySelector('#fig-load .ytitle').textContent === 'Mean TPOT, ms'")
    opened.page.locator("#fig-load input").first.focus()
    opened.page.keyboard.press("ArrowRight")
    until(opened.page, "document.querySelector('#fig-load .ytitle').textContent === 'Gain in mean TPOT, %'")


def test_every_choice_of_every_figure_draws(opened):
    for control in opened.page.locator("figure select").all():
        for value in [o.get_attribute("value") for o in control.locator("option").all()]:
            control.select_option(value)
    for radio in opened.page.locator("figure input[type=radio]").all():
        radio.check(force=True)
        opened.page.evaluate("new Promise(r => setTimeout(r, 30))")
    assert opened.page.locator(DRAWN).count() == FIGURES
    assert opened.complaints == []


def test_a_legend_entry_hides_and_shows_its_series(opened):
    entry = opened.page.locator("#fig-front .legend button", has_text="Random search")
    points = opened.page.locator("#fig-front .scatterlayer .trace .point")
    before = points.count()
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert points.count() < before
    entry.click()
    assert points.count() == before


def test_the_theme_switch_recolours_page_and_figures_and_is_remembered(browser, report):
    opened = Opened(browser.new_page(color_scheme="light"), report)
    look = (
        "[getComputedStyle(document.body).backgroundColor, document.querySelector('#fig-front .xtitle').style.fill,"
        " document.querySelector('#fig-front .point').style.fill]"
    )
    light = opened.page.evaluate(look)
    opened.page.locator("button.theme").click()
    until(opened.page, "document.querySelector('#fig-front .xtitle').style.fill === 'rgb(163, 174, 194)'")
    dark = opened.page.evaluate(look)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert opened.page.locator("button.theme").get_attribute("aria-pressed") == "true"
    opened.page.reload()
    opened.wait()
    assert opened.page.evaluate(look) == dark
    assert opened.complaints == []
    opened.page.close()


def test_figures_that_are_said_to_be_drawn_have_the_theme_that_was_chosen_last(
    opened,
):
    before, after = opened.page.evaluate(SWITCHED_TWICE)
    assert len(before) > 4
    assert after == before


def test_the_trials_sort_by_a_column_with_failures_last_and_filter_by_words(opened):
    page = opened.page
    head = page.locator("#table-trials thead th", has_text="Mean latency")
    head.locator("button").click()
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    column = "[...document.querySelectorAll('#table-trials tbody tr')].map(r => r.cells[3].dataset.sort)"
    values = page.evaluate(column)
    known = [float(v) for v in values if v is not None]
    assert known == sorted(known, reverse=True)
    assert None not in values[: len(known)]
    page.locator("[data-table=trials] input").fill("static 4096")
    assert page.locator("#table-trials tbody tr:visible").count() == 1
    assert "1 of" in page.locator("[data-table=trials] .count").inner_text()


def test_the_exported_setting_can_be_copied_in_each_of_its_forms(browser, report):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = Opened(context.new_page(), report).page
    assert page.locator(".tab:visible").count() == 1, "one form is shown at a time"
    for form, words in (("yaml", "scheduler-cls:"), ("env", "export PPAS_"), ("name", "/"), ("json", '"b_cap"')):
        page.locator(f".tabs input[value={form}]").check(force=True)
        button = page.locator(f"button[data-copy=exported-{form}]")
        button.click()
        button.get_by_text("Copied").wait_for()
        assert words in page.evaluate("navigator.clipboard.readText()")
    context.close()


def test_the_first_key_leads_past_the_navigation(browser, report):
    opened = Opened(browser.new_page(), report)
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.textContent") == "Skip to the report"
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "main"
    opened.page.close()


def test_markup_in_names_is_shown_as_text_and_never_runs(browser, tmp_path):
    write_report(odd_studies.hostile(), tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    opened = Opened(page, tmp_path / "report.html")
    hover_over_the_reference(page)
    assert odd_studies.HOSTILE[:40] in page.locator("#fig-front .hoverlayer .hovertext").text_content()
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, .js-plotly-plot a[href]").count() == 0
    assert odd_studies.HOSTILE[:20] in page.locator("h1").inner_text()
    assert opened.complaints == []
    assert opened.overflow() == 0
    page.close()


@pytest.mark.parametrize("name", ["nothing is finite", "one regime", "one trial of the search", "three objectives"])
def test_an_odd_study_opens_without_a_complaint(browser, tmp_path, name):
    write_report(odd_studies.ODD[name](), tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 390, "height": 900})
    opened = Opened(page, tmp_path / "report.html")
    drawn, said = page.locator(DRAWN).count(), page.locator("figure > .empty:visible, .left-out").count()
    assert drawn + said == FIGURES
    assert opened.complaints == []
    assert opened.overflow() == 0
    page.close()


def hover_over_the_reference(page) -> None:
    """Moves the mouse over the reference trial, which stands at (0, 0), where the real axes put it."""
    page.locator("#fig-front").scroll_into_view_if_needed()
    x, y = page.evaluate(
        "(() => { const p = document.querySelector('#fig-front .js-plotly-plot'), l = p._fullLayout,"
        " box = p.getBoundingClientRect();"
        " return [box.left + l.xaxis._offset + l.xaxis.l2p(0), box.top + l.yaxis._offset + l.yaxis.l2p(0)]; })()"
    )
    page.mouse.move(x - 3, y - 3)
    page.mouse.move(x, y, steps=3)
    page.locator("#fig-front .hoverlayer .hovertext").wait_for()
