"""A study from Python: tune on the simulator, read the typed result, export, draw. Run it from anywhere, it takes seconds."""

import tempfile
from pathlib import Path

from autotune import load_results, tune
from reports.notebook import figure

folder = Path(tempfile.mkdtemp())

# What a study file would say, as a dictionary; a path to such a file does as well.
results = tune(
    {
        "name": "from-python",
        "workload": {"family": "rag-bursts", "rates_per_s": [0.4, 1.0]},
        "static_budgets": [2048, 16384],
        "space": {"preset": "ppas", "b_max": {"low": 2048, "high": 16384, "step": 256}},
        "tuning_seeds": [0, 1],
        "held_out_seeds": [10, 11, 12],
        "trials": 10,
        "sampler": "tpe",
    },
    folder / "run",
)

tuned = results.exported.to_params()
print(f"exported: {results.exported_role}, b_max {tuned.b_max}, b_cap {tuned.b_cap}, n_th {tuned.n_th}")
for comparison in results.comparisons:
    effect = comparison.overall[comparison.preferred_metric]
    print(
        f"{comparison.candidate} against {comparison.reference}: {effect.improvement_pct:+.1f} %, {comparison.verdict}"
    )

again = load_results(folder / "run")  # any finished run folder
assert again.exported == results.exported  # noqa: S101 - an example may show what holds

front = figure(again, "front")  # a Plotly figure; in a notebook it shows itself
front.write_html(folder / "front.html")
print(f"drawn: {(folder / 'front.html').stat().st_size > 0}")
