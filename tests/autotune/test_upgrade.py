"""Files of other releases: older ones are read, newer ones refused with both versions and the remedy; docs/upgrade.md."""

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_study import small

from autotune.cli.pipeline import write_exports
from autotune.export import load_export, write_export
from autotune.heartbeat import Heartbeat
from autotune.plan import make_plan
from autotune.record.journal import assemble
from autotune.replay.records_file import read_records
from autotune.results import StudyResults
from autotune.runfolder import existing_run
from autotune.spec import StudySpec
from autotune.status import Watch
from autotune.study import Outcome
from autotune.tune import tune
from autotune.verify import verify
from ppas_core.errors import InvalidInput
from ppas_core.sim.profile import load_profile
from traces.format import SESSIONS, read_trace

SPEC = small(trials=1, robustness_rates=[], tuning_seeds=[0], held_out_seeds=[10])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study, of this release."""
    run = tmp_path_factory.mktemp("made") / "run"
    with Heartbeat(run, "tune") as heartbeat:
        results = tune(make_plan(SPEC), run, heartbeat)
    write_export(results, run / "export")
    existing_run(run).write_manifest()
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


# --- older ---

TRACE_1 = """\
{"format":"ppas-trace","version":1,"name":"old","regime":"all","seed":null,"block_size":null,"provenance":{},\
"num_requests":2,"digest":"sha256:a09f54cca77a552615be9b524a347991e0020410a6fa51dfc6a662767d969751"}
{"arrival_s":0.25,"prompt_tokens":100,"output_tokens":4}
{"arrival_s":1.75,"prompt_tokens":200,"output_tokens":8,"session":"a"}
"""
TRACE_2 = """\
{"format":"ppas-trace","version":2,"mode":"sessions","name":"talk","regime":"all","seed":null,"block_size":null,\
"provenance":{},"num_requests":2,"digest":"sha256:102cf54b7b2546ff9bb500bfe7c5aade84e83d87d06c65d7721ffb4493960a54"}
{"arrival_s":0.25,"prompt_tokens":100,"output_tokens":4,"session":"a"}
{"arrival_s":1.75,"prompt_tokens":200,"output_tokens":8,"session":"a","think_time_s":0.5}
"""


def test_traces_of_both_versions_are_read(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text(TRACE_1)
    second.write_text(TRACE_2)
    assert [request.arrival_s for request in read_trace(first).requests] == [0.25, 1.75]
    assert read_trace(second).mode == SESSIONS


def without_defaults(data: dict[str, Any]) -> None:
    """Takes out what this release may leave out: what the first one had not."""
    for key in (*optional(StudyResults), "version"):
        data.pop(key, None)
    for trial in data["trials"]:
        for key in ("reason", "by_trace", "predicted", "client", "cached_share", "server_memory_bytes", "measurements"):
            trial.pop(key, None)
    for comparison in data["comparisons"]:
        comparison.pop("costs")


def optional(model: Any) -> list[str]:
    return [name for name, field in model.model_fields.items() if not field.is_required()]


def test_an_older_run_folder_goes_on_as_if_it_said_todays_defaults(run: Path) -> None:
    edit(run / "identity.json", lambda data: data.pop("version"))
    edit(run / "identity.json", lambda data: [data["spec"].pop(key) for key in ("more_workloads", "prefix_caching")])
    edit(run / "results.json", without_defaults)
    edit(run / "progress.json", lambda data: [data.pop(key) for key in ("updated_monotonic_s", "boot_id")])
    for file in run.glob("*/*/metrics.json"):
        edit(
            file,
            lambda data: [
                data.pop(key)
                for key in ("client", "cached_share", "by_trace", "stopped", "server_memory_bytes", "measurements")
            ],
        )
    old = StudyResults.load(run / "results.json")
    assert (old.version, old.server_memory, old.trials[0].server_memory_bytes) == (1, None, None)
    write_exports(old, existing_run(run), run / "export", None)
    existing_run(run).write_manifest()
    assert verify(run).findings == (), "the export names the digest of the file that it was made from"
    status = Watch(run).status()
    assert (status.state, status.trials_done) == ("finished", len(list((run / "trials").iterdir())))
    assert status.updated_s_ago is not None
    before = {file: file.stat().st_mtime_ns for file in (run / "trials").rglob("metrics.json")}
    again = tune(make_plan(SPEC), run)
    assert {file: file.stat().st_mtime_ns for file in (run / "trials").rglob("metrics.json")} == before
    assert again.exported == old.exported


def test_an_older_outcome_and_an_older_study_get_todays_defaults() -> None:
    outcome = Outcome.from_dict(
        {"objectives": {"mean_latency_s": 0.9}, "regimes": {}, "branch_steps": {}, "duration_s": 1.0}
    )
    assert (outcome.reason, outcome.client, outcome.server_memory_bytes, outcome.by_trace) == (None, None, None, {})
    assert StudySpec.model_validate({"name": "x"}).race


def test_an_older_profile_is_read_without_a_prefix_cache(tmp_path: Path) -> None:
    data = load_profile("rtx5090-qwen2.5-3b").to_dict()
    data.pop("prefix_caching", None)
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert not load_profile(str(tmp_path / "old.json")).prefix_caching


# --- newer ---


def newer_profile(folder: Path) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps({**load_profile("rtx5090-qwen2.5-3b").to_dict(), "version": 99, "more": 1}))
    return path


def newer_trace(folder: Path) -> Path:
    path = folder / "new.jsonl"
    path.write_text(TRACE_1.replace('"version":1,', '"version":99,"more":1,'))
    return path


def newer_journal(folder: Path) -> Path:
    path = folder / "new.part"
    path.write_text('{"format": "ppas-recording", "version": 99, "block_size": 16, "started_ns": 1}\n')
    return path


def newer_records(folder: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    header = json.dumps({"format": "ppas-requests", "version": 99}).encode()
    path = folder / "new.parquet"
    parquet.write_table(pa.table({"a": [1]}).replace_schema_metadata({"ppas": header}), path)
    return path


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (newer_trace, read_trace),
        (newer_journal, lambda path: assemble(path, name="x")),
        (newer_records, read_records),
        (newer_profile, lambda path: load_profile(str(path))),
    ],
    ids=["trace", "recording", "replay", "profile"],
)
def test_a_newer_file_is_refused_with_both_versions_and_the_remedy(
    tmp_path: Path, make: Callable[[Path], Path], read: Callable[[Path], object]
) -> None:
    must_be_refused(lambda: read(make(tmp_path)))


def must_be_refused(read: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput) as refused:
        read()
    assert re.search(
        r"version 99; this release reads versions? \d( to \d)?; a newer ppas wrote it: update ppas-autotune, or .",
        str(refused.value),
    ), str(refused.value)


def test_a_newer_run_folder_is_refused_by_whatever_opens_it_and_stays_as_it_is(run: Path) -> None:
    edit(run / "identity.json", lambda data: data.update(version=99, more={}))
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    plan = make_plan(SPEC)
    for read in (lambda: tune(plan, run), lambda: existing_run(run), lambda: Watch(run), lambda: verify(run)):
        must_be_refused(read)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_newer_results_and_a_newer_export_are_refused(run: Path) -> None:
    edit(run / "results.json", lambda data: data.update(version=99, more={}))
    must_be_refused(lambda: StudyResults.load(run / "results.json"))
    edit(run / "export/settings.json", lambda data: data.update(version=99))
    must_be_refused(lambda: load_export(run / "export/settings.json"))


def test_what_is_no_version_is_called_damaged(run: Path, tmp_path: Path) -> None:
    edit(run / "identity.json", lambda data: data.update(version="one"))
    with pytest.raises(InvalidInput, match="version 'one'; this release reads version 1; it is damaged"):
        existing_run(run)


def test_a_database_of_another_optuna_is_refused_in_words(run: Path) -> None:
    with sqlite3.connect(run / "study.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v99.0.0'")
    with pytest.raises(InvalidInput, match=r"study\.db: .*no longer compatible.*Please try updating optuna"):
        tune(make_plan(SPEC), run)
