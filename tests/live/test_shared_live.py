"""A live study that two workers share, each with a server of its own (a stand-in for vLLM)."""

from pathlib import Path

import pytest
from live_study import own_server, plan_of, write_study

from autotune.distributed import agreement
from autotune.distributed.url import StorageUrl
from autotune.distributed.work import Shared, work
from autotune.progress import Silent
from autotune.tune import tune
from ppas_core.errors import InvalidInput


def made(folder: Path, **server: object) -> Path:
    """A study file in a folder of its own, as on another machine."""
    folder.mkdir()
    return write_study(folder, {**own_server(folder), **server}, min_gain_pct=50, trials=2)


def test_a_live_study_is_measured_by_a_worker_and_finished_elsewhere_and_other_flags_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in's latencies are those of this machine's other work, and as far apart.
    monkeypatch.setattr(agreement, "MOST_APART", 1000.0)
    where = StorageUrl.parse(f"sqlite:///{tmp_path / 's.db'}")

    def shared() -> Shared:
        return Shared(where, say=lambda text: None, heartbeat_s=2.0)

    one, other, stranger = (
        made(tmp_path / "one"),
        made(tmp_path / "other"),
        made(tmp_path / "else", flags=["--seed", "1"]),
    )
    done, search = work(plan_of(one), tmp_path / "one" / "run", Silent(), shared())
    assert len(done) == search.total
    assert search.mine() == set(range(search.total))
    with pytest.raises(InvalidInput, match=r"another machine: flags is \[\] there, \['--seed', '1'\] here"):
        work(plan_of(stranger), tmp_path / "else" / "run", Silent(), shared())

    results = tune(plan_of(other), tmp_path / "other" / "run", Silent(), shared())
    searched = [trial for trial in results.trials if trial.dimensions]
    assert len(searched) == search.total
    assert [list(trial.objectives) for trial in searched] == [["mean_latency_s"]] * search.total
    assert len(list((tmp_path / "other" / "run" / "trials").glob("*/metrics.json"))) == search.total
