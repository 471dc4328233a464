"""How a study's results become one HTML file that opens offline. Reads the results and nothing else.

The page holds its styles, its script, plotly.js and its data. A content security policy forbids every request and every
script but these three (by digest), so that even text that slipped through the escaping could not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

import ppas_core
from autotune.records import Origin
from autotune.results import StudyResults
from ppas_core.files import write_atomically
from reports import forecast, legend, panels, quality, roles, statics, summary, tables, theme, verdict
from reports.numbers import capitalised, cleaned, moment
from reports.odds import Odds, front_odds
from reports.panel import Panel
from reports.views import Missing

_TEMPLATES = Path(__file__).parent / "templates"
_LONG = 24
_MANY = 12
"""Strings and lists from this length on are worth standing once."""


def write_report(results: StudyResults, path: Path) -> None:
    """Writes the report of `results` to `path`, whole or not at all. Raises OSError."""
    write_atomically(path, render(results).encode("utf-8", "replace"))


def render(results: StudyResults) -> str:
    """The report of `results` as one HTML document."""
    odds = front_odds(results)
    return page(results, panels.all_panels(results, odds), odds)


def page(results: StudyResults, shown: Mapping[str, Panel], known: Odds | None = None) -> str:
    """The document around panels that were drawn before. known: the odds, when already computed."""
    odds = front_odds(results) if known is None else known
    return document(
        "report.html.j2",
        shown,
        title=cleaned(results.name, 120),
        kind="P-PAS tuning report",
        simulated=results.origin is Origin.SIMULATED,
        created_at=moment(results.created_at),
        choice=cleaned(results.choice, 1000),
        warnings=[capitalised(cleaned(w, 1000)) for w in results.warnings],
        not_identified=[(cleaned(k), cleaned(reason, 500)) for k, reason in results.not_identified.items()],
        headline=verdict.headline(results),
        names=legend.names(results),
        load_lead=statics.sentence(results),
        quality=_quality(results),
        judged=forecast.judged(results),
        saturated=[cleaned(regime, 60) for regime in results.saturated],
        robustness_simulated=_mixed(point.origin for point in results.robustness),
        tables={
            table.id: table
            for table in (
                tables.settings_table(results),
                tables.regimes_table(results),
                tables.comparisons_table(results),
                tables.trials_table(results, odds),
                tables.traces_table(results),
                tables.noise_table(results),
                tables.failures_table(results),
            )
        },
        snippets=summary.snippets(results),
        exported_is_static=roles.is_static(results.exported),
        commands=summary.commands(results),
        digests=summary.digests(results),
        study_file=summary.study_file(results),
        provenance=summary.provenance(results),
        space=summary.entries(results.space),
    )


def document(template: str, shown: Mapping[str, Panel], **context: Any) -> str:
    """A whole page: one of our templates with the figures `shown`, the scripts, and what it needs besides."""
    scripts = {
        "boot": _asset("boot.js"),
        "plotly": get_plotlyjs(),
        "report": _asset("report.js"),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        **context,
        version=ppas_core.__version__,
        panels=shown,
        policy=_policy(scripts.values()),
        style=Markup(_asset("report.css")),  # noqa: S704 - ours, not the results'
        scripts={name: Markup(text) for name, text in scripts.items()},  # noqa: S704 - ours, not the results'
        **_data(shown),
    )


def _mixed(origins: Iterable[Origin]) -> bool | str:
    """Whether these are simulated, or `both` where some are and some are not."""
    found = set(origins)
    return "both" if len(found) > 1 else Origin.SIMULATED in found


def _quality(results: StudyResults) -> dict[str, str | None] | None:
    """The words of the section on measurement quality; None where measurements do not vary."""
    if not quality.applies(results):
        return None
    return {
        "lead": quality.lead(results),
        "cold": quality.cold_words(results),
        "lag": quality.lag_words(results),
        "memory": quality.memory_words(results),
    }


def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _policy(scripts: Any) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # Plotly writes style attributes and rules at run time, and saves pictures through data: and blob: addresses.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _data(shown: Mapping[str, Panel]) -> dict[str, Markup]:
    """The figures as JSON. Long strings and lists recur (the same trial in many figures), so they stand once, apart."""
    kept: dict[str, int] = {}
    data = _script_json(_interned(_figures(shown), kept))
    parts = Markup("[" + ",".join(kept) + "]")  # noqa: S704 - escaped by _script_json
    return {"data": Markup(data), "texts": parts}  # noqa: S704 - escaped by _script_json


def _interned(value: Any, kept: dict[str, int]) -> Any:
    """`value` with its long strings and lists replaced by their places in `kept`, which holds each once, as JSON."""
    if isinstance(value, str):
        return {"$": kept.setdefault(_script_json(value), len(kept))} if len(value) >= _LONG else value
    if isinstance(value, list):
        made = [_interned(item, kept) for item in value]
        is_column = len(value) >= _MANY and not any(isinstance(item, dict) for item in value)
        return {"$": kept.setdefault(_script_json(made), len(kept))} if is_column else made
    if isinstance(value, dict):
        return {key: _interned(item, kept) for key, item in value.items()}
    return value


def _figures(shown: Mapping[str, Panel]) -> dict[str, Any]:
    return {
        "colours": theme.dark_by_light(),
        "template": _plain(theme.template().to_plotly_json()),
        "panels": {
            panel.id: {"rows": panel.rows, "variants": {key: _variant(v) for key, v in panel.variants.items()}}
            for panel in shown.values()
            if panel.missing is None
        },
    }


def _variant(variant: Any | Missing) -> dict[str, Any]:
    if isinstance(variant, Missing):
        return {"missing": variant.reason}
    figure = variant.to_plotly_json()
    figure["layout"].pop("template")  # the same for all: the page holds it once
    return {"data": _plain(figure["data"]), "layout": _plain(figure["layout"])}


def _plain(value: Any) -> Any:
    """`value` as JSON types; numbers that JSON cannot hold become null, which Plotly draws as a gap."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return _plain(value.to_plotly_json() if hasattr(value, "to_plotly_json") else value.tolist())


def _script_json(data: Any) -> str:
    """`data` as JSON that cannot end the script element around it, whatever its strings hold."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
