"""The report as a file: complete, offline, safe and small, whatever the study holds."""

from __future__ import annotations

import json
import os
import re
import time
from functools import cache
from html.parser import HTMLParser

import odd_studies
import pytest
import sample_study
import yaml

from autotune.calibration.device import machine
from autotune.results import StudyResults
from autotune.timeline import MAX_STRETCHES
from reports import html, panels, summary
from reports.html import render, write_report
from reports.panels import Panel
from reports.views import Missing

PANELS = [
    "front",
    "load",
    "effects",
    "requests",
    "differences",
    "branches",
    "timeline",
    "convergence",
    "importance",
    "slices",
    "landscape",
]
SOMETIMES = ("drift", "prediction", "maps", "robustness")
VOID = {"meta", "link", "img", "br", "input", "hr", "line", "path", "circle"}


class Page(HTMLParser):
    """Elements, text outside scripts, and whether every element closes where it should."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@cache
def odd(name: str) -> tuple[Page, dict[str, Panel]]:
    study = odd_studies.ODD[name]()
    shown = panels.all_panels(study)
    return Page(html.page(study, shown)), shown


@pytest.fixture(scope="module")
def study() -> StudyResults:
    return sample_study.build()


@pytest.fixture(scope="module")
def page(study) -> Page:
    return Page(render(study))


def test_every_element_closes_and_every_id_is_unique(page):
    assert page.open == []
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    named = {
        i
        for _, attrs in page.tags
        for key in ("aria-labelledby", "aria-describedby")
        for i in (attrs.get(key) or "").split()
    }
    named |= {attrs["href"][1:] for _, attrs in page.tags if (attrs.get("href") or "").startswith("#")}
    assert named <= set(ids)


def test_no_element_refers_to_anything_outside_the_file(page):
    addresses = [
        v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href", "srcset", "action", "data")
    ]
    assert [a for a in addresses if not a.startswith("#") and a != "data:,"] == []
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "unsafe-eval" not in policy


def test_every_figure_has_a_heading_a_caption_and_a_text_alternative(page, study):
    assert [a["data-panel"] for t, a in page.tags if t == "figure"] == [
        "front",
        "effects",
        "load",
        "requests",
        "differences",
        "branches",
        "timeline",
        "convergence",
        "importance",
        "slices",
        "landscape",
    ]
    assert "drift" not in panels.all_panels(study)
    assert sum(t == "figcaption" for t, _ in page.tags) == len(PANELS)
    for panel in panels.all_panels(study).values():
        assert panel.missing is None
        assert len(panel.alt) > 20
        assert panel.alt in page.text


def test_a_simulated_study_says_so_in_the_title_the_header_and_every_figure(page):
    badges = [a for _, a in page.tags if "badge-sim" in (a.get("class") or "")]
    assert len(badges) >= 1 + len(PANELS) + 3
    assert "(simulated)" in page.text
    assert page.text.count("Simulated, not measured on a server.") == len(PANELS)
    assert "Measurement quality" not in page.text
    assert not any("badge-live" in (a.get("class") or "") for _, a in page.tags)


def test_a_live_study_never_says_simulated():
    page = odd("measured live")[0]
    assert "simulated" not in page.text.lower()
    assert page.text.count("Measured on a live server.") == len(PANELS) + 1
    badges = [a for _, a in page.tags if "badge" in (a.get("class") or "").split()]
    assert len(badges) > len(PANELS)
    assert all("badge-live" in a["class"] for a in badges)


def test_a_live_study_shows_its_noise_its_drift_its_cold_start_and_its_failures():
    page, shown = odd("measured live")
    assert "From 5.1 % on, a difference in mean end-to-end latency on the held-out traces is more than" in page.text
    assert "over 6 tuning traces 4.20 % 1.70 % 5.20 % 6.90 % 5.10 % 4" in page.text
    assert (
        "2 further measurements of the reference: at most 8.4 % from its first measurement. 1 within what noise"
        in page.text
    )
    assert "1 measurement failed; the first, after 16 trials: 2 of 40 requests failed: timeout." in page.text
    assert "on a server started cold with the exported file: 2.3 % higher than on the warm one" in page.text
    failed = [t for t in odd_studies.live().trials if t.state == "failed"]
    assert f"Failed trials: {len(failed)} of 28" in page.text
    assert list(shown["drift"].variants[""].data[0].y) == [0.0, 1.2, -8.4]
    # 6.9 % over the 6 tuning traces is 6.9 · √(6/4) = 8.5 % over the 4 traces of the cold server.
    assert "That is no more than noise explains, which alone stays below 8.5 % over so many traces." in page.text
    assert "Between two trials noise alone stays below 5.2 % (95%), so closer ones cannot be told apart." in page.text
    assert "P95 end-to-end latency noise not known" in page.text


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("live, nothing measured again", "The noise of this study was not measured."),
        ("live, nothing measured again", "The search was too short to measure the reference again."),
        ("live, nothing measured again", "was not measured on a server started cold"),
        ("live, measured in vain", "The reference could not be measured again: timeout"),
        ("live, measured in vain", "could not be measured on a server started cold with it: the server did not start"),
    ],
)
def test_what_a_live_study_could_not_measure_of_itself_is_said(name, sentence):
    assert sentence in odd(name)[0].text


def test_the_headline_is_the_verdict_with_its_interval(page):
    assert "Better The tuned setting is better than the paper default in mean latency" in page.text
    assert "mean end-to-end latency is 7.9 % lower (95% interval 6.0 to 9.6 % lower)" in page.text
    assert "7.9 % lower 95% interval: 6.0 to 9.6 % lower" in page.text
    assert "86.0 % of them 95% interval: 82.0 to 89.5 %; slower: 9.0 %" in page.text


def test_every_trial_every_trace_digest_and_every_held_out_mean_is_in_a_table(page, study):
    rows = [a["id"] for t, a in page.tags if t == "tr" and "id" in a]
    assert rows == [f"trial-{t.number}" for t in study.trials]
    for trace in study.traces:
        assert trace.digest in page.text
    assert page.text.count("2 of 31 requests failed: timeout") == sum(t.state == "failed" for t in study.trials)
    assert "3.10 s" in page.text
    assert "31.0 ms" in page.text


def test_the_command_the_setting_the_warnings_and_the_unidentified_knobs_are_there(page, study):
    assert "ppas tune examples/rag-bursts.yaml --runs 'runs/my study'" in page.text
    assert " ".join(json.dumps(study.exported.params, indent=2).split()) in page.text
    assert study.warnings[0] in page.text
    assert "decode_guard : the branch never fired" in page.text
    assert "rtx5090-qwen2.5-3b" in page.text


def test_the_study_file_is_there_as_yaml_that_reads_back(study):
    resolved = {"name": "demo", "space": {"preset": "ppas"}, "rates_per_s": [0.4, 1.2], "limits": None}
    changed = study.model_copy(update={"provenance": {"study": resolved}})
    assert yaml.safe_load(summary.study_file(changed)) == resolved
    assert "preset: ppas" in Page(render(changed)).text


def test_the_machine_stands_first_and_what_vllm_said_of_itself_is_folded(study):
    server = {
        "settings": "mbt-16384 s16",
        "kv_blocks": 762,
        "flags": {"port": 37581},
        "cache": {"sliding_window": "None"},
    }
    measured_on = {"backend": "vllm", "url": None, "flags": ["--dtype", "float32", "--x", "a b"], "server": server}
    of = {"sampler": "tpe", "measured_on": measured_on, "platform": machine()}
    first, *_, last = summary.provenance(study.model_copy(update={"provenance": of}))
    assert first.name == "machine"
    told = {entry.name: entry.text for entry in first.entries}
    assert told["cores"] == str(len(os.sched_getaffinity(0)))
    assert float(told["memory, GiB"] or 0) > 0.1
    assert told["processor"]
    assert last.is_folded
    text = Page(render(study.model_copy(update={"provenance": of}))).text
    shown, _, folded = text.partition("What vLLM said of itself")
    assert "setting that it was started with mbt-16384 s16" in shown
    assert "--dtype float32 --x 'a b'" in shown
    assert ("37581" in shown, "sliding_window" in shown) == (False, False)
    assert "its port among them port 37581" in folded
    joined = {**of, "measured_on": {**measured_on, "url": "http://gpu:8000"}}
    first, *_ = summary.provenance(study.model_copy(update={"provenance": joined}))
    assert first.name == "machine of the tuner; the server was joined at its address"


def test_plotly_is_in_the_file_once(page):
    assert sum(script.count("* plotly.js v") for script in page.scripts) == 1


@pytest.mark.parametrize("name", list(odd_studies.ODD))
def test_an_odd_study_still_makes_a_whole_report(name):
    page, shown = odd(name)
    assert page.open == []
    left_out = shown["landscape"].missing is not None  # a line instead of an empty card
    assert sum(t == "figure" for t, _ in page.tags) == len(shown) - left_out
    assert len(shown) == len(PANELS) + sum(p in shown for p in SOMETIMES)
    for panel in shown.values():
        for variant in panel.variants.values():
            if isinstance(variant, Missing):
                assert len(variant.reason) > 20
            else:
                assert any(_has_data(trace) for trace in variant.data), (name, panel.id)
        if panel.missing:
            assert panel.missing in page.text
    for word in ("nan", "inf", "none", "undefined", "null"):
        assert not re.search(rf"\b{word}\b %|\b{word}\b m?s\b", page.text.lower()), word


def _has_data(trace) -> bool:
    values = trace.z if trace.type == "heatmap" else trace.x
    return values is not None and any(v is not None for v in values)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no random arm", "No random arm was run in this study"),
        ("no landscape", "did not evaluate a plane of the space"),
        ("all trials failed", "None of the 28 trials finished"),
        ("nothing held out", "compared no settings on held-out traces"),
        ("no words", "recorded no command line"),
        ("no clear winner", "No clear winner: the paper default stays"),
    ],
)
def test_what_is_missing_is_said_in_words(name, sentence):
    assert sentence in odd(name)[0].text


def test_markup_in_any_name_is_text_in_the_page_and_cannot_end_a_script():
    page, _ = odd("markup everywhere")
    assert page.open == []
    assert not any(t == "img" or "onerror" in a for t, a in page.tags)
    assert sum(t == "script" for t, _ in page.tags) == 5
    assert page.text.count(odd_studies.HOSTILE.replace("  ", " ")) > 20
    data = [s for s in page.scripts if s.startswith(("[", "{"))]
    assert len(data) == 2
    for text in data:
        assert "<" not in text
        json.loads(text)


def test_markup_in_any_name_is_escaped_in_every_label_that_plotly_reads():
    texts = []
    for panel in odd("markup everywhere")[1].values():
        for figure in panel.variants.values():
            if not isinstance(figure, Missing):
                texts += _strings(figure.to_plotly_json())
    ours = re.compile(r"</?b>|<br>|<extra>|</extra>|%\{[a-z\[\]0-9]+(:[^}]*)?\}")
    seen = [t for t in texts if "window.pwned" in t]
    assert len(seen) > 50
    for text in seen:
        assert "<" not in ours.sub("", text.replace("&lt;", "")), text


def _strings(value) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for v in value.values() for s in _strings(v)]
    if isinstance(value, list | tuple):
        return [s for v in value for s in _strings(v)]
    return []


def test_three_hundred_trials_and_thousands_of_requests_stay_under_six_megabytes_and_five_seconds(tmp_path):
    study = sample_study.build(num_search=150, num_random=142, requests=400)
    assert len(study.trials) == 300
    write_report(odd_studies.live(), tmp_path / "warm.html")
    begun = time.process_time()  # of one thread: what it takes on a free core
    write_report(study, tmp_path / "report.html")
    assert time.process_time() - begun < 5
    assert (tmp_path / "report.html").stat().st_size < 6_000_000


def test_the_largest_study_with_a_simulator_beside_it_stays_under_six_megabytes():
    """300 trials, each foretold; a time line as long as one may be; a map for each of 24 pairs of knobs."""
    study = sample_study.build(num_search=150, num_random=142, requests=400)
    times = [i * 0.11 for i in range(MAX_STRETCHES)]
    lanes = [
        lane.model_copy(
            update={
                "start_s": times,
                "end_s": [t + 0.0987 for t in times],
                "steps": [1 + i % 7 for i in range(MAX_STRETCHES)],
                "budget": [2944 if i % 3 else 16384 for i in range(MAX_STRETCHES)],
                "branch": [int(i % 3 > 0) for i in range(MAX_STRETCHES)],
                "running": [i % 9 for i in range(MAX_STRETCHES)],
                "waiting": [i % 31 for i in range(MAX_STRETCHES)],
                "tokens": [1234.5 + i for i in range(MAX_STRETCHES)],
            }
        )
        for lane in study.timeline.lanes
    ]
    grid = [1024 * (i + 1) for i in range(12)]
    plane = study.landscape.model_copy(
        update={"x": grid, "y": grid, "ratio": [[1 - 0.00123 * (i + j) for i in range(12)] for j in range(12)]}
    )
    large = study.model_copy(
        update={
            "trials": [t.model_copy(update={"predicted": t.objectives}) for t in study.trials],
            "timeline": study.timeline.model_copy(update={"lanes": lanes}),
            "maps": [plane.model_copy(update={"fixed": {"n_th": n, "t_large": t}}) for n in range(6) for t in range(4)],
        }
    )
    assert len(render(large).encode()) < 6_000_000


def test_the_same_results_give_the_same_bytes_and_so_does_the_saved_file(tmp_path):
    study = odd_studies.live()
    study.save(tmp_path / "results.json")
    first = render(study)
    assert render(study) == first
    assert render(StudyResults.load(tmp_path / "results.json")) == first
