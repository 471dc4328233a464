"""The study's database opens in optuna-dashboard as it is."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, make_server

import optuna
import optuna_dashboard
import pytest

from autotune import load_results


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def dashboard(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard on a copy of the study's database."""
    database = tmp_path_factory.mktemp("dashboard") / "study.db"
    for file in finished_run.glob("study.db*"):
        shutil.copy(file, database.with_name(file.name))
    storage = optuna.storages.RDBStorage(f"sqlite:///{database}")
    server = make_server("127.0.0.1", 0, optuna_dashboard.wsgi(storage), handler_class=Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def get(address: str) -> bytes:
    with urlopen(address, timeout=30) as answer:  # noqa: S310 - our own server
        assert answer.status == 200
        body: bytes = answer.read()
        return body


def test_its_page_opens(dashboard: str) -> None:
    assert b"<html" in get(f"{dashboard}/dashboard").lower()


def test_it_shows_the_study_with_every_trial_its_objectives_and_its_settings(
    dashboard: str, finished_run: Path
) -> None:
    (study,) = json.loads(get(f"{dashboard}/api/studies"))["study_summaries"]
    assert (study["study_name"], len(study["directions"])) == ("small", 2)
    detail = json.loads(get(f"{dashboard}/api/studies/{study['study_id']}"))
    assert detail["objective_names"] == ["mean_latency_s", "p95_latency_s"]
    results = load_results(finished_run)
    assert len(detail["trials"]) == len(results.trials)
    for shown, trial in zip(detail["trials"], results.trials, strict=True):
        assert shown["state"] == "Complete"
        assert shown["values"] == pytest.approx(list(trial.objectives.values()))
        notes = {entry["key"]: entry["value"] for entry in shown["user_attrs"]}
        assert json.loads(notes["settings"]) == trial.setting.params
