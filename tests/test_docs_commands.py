"""Every command in the README and the docs is run as it stands there, on small inputs, or is listed here with the reason."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from typer.testing import CliRunner

from autotune.cli import app
from autotune.spec import load_spec
from ppas_core.sim.profile import DEFAULT_PROFILE, load_profile
from traces.format import Trace, TraceRequest, write_trace
from traces.generate import rag_bursts
from traces.shape import scale_time

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {
    "make demo": "it installs; what it runs then stands in docs/start.md",
    "make test": "it is what runs this test",
    "ppas calibrate live.yaml -o mine.json": "needs a server; tests/live/test_calibrate_live.py calibrates one",
    "ppas replay --url http://127.0.0.1:8000 --trace traffic.jsonl -o records.parquet": (
        "needs a server; tests/live/test_replay_command.py has one"
    ),
    "ppas serve Qwen/Qwen2.5-0.5B-Instruct --config runs/demo/export/vllm.yaml": (
        "starts a server; tests/vllm/test_serve.py does"
    ),
    "serve ppas serve Qwen/Qwen2.5-0.5B-Instruct --config runs/demo/export/vllm.yaml": "what `ppas tune` prints at its end",
    "ppas top runs/live": "watches a live run; tests/autotune/test_terminal_docs.py watches one on a terminal",
    "ppas trace record --to http://127.0.0.1:8000 --port 8001 --for 10m -o traffic.jsonl": (
        "needs a server and its clients; tests/record/test_recording.py has both"
    ),
    "ppas tune examples/live-cpu-smoke.yaml": "serves vLLM's CPU build for minutes; tests/live/test_live_study.py does",
    "ppas tune examples/live-cpu.yaml": "wants a quiet machine for long; tests/live/test_live_study.py runs live-cpu-smoke",
    "ppas tune live.yaml": "serves a model; tests/live/test_live_study.py does on the CPU build",
    "ppas tune live.yaml --storage postgresql://tuner@db/ppas": "needs a database, which tests/distributed starts",
    "ppas worker live.yaml --storage postgresql://tuner@db/ppas --gpus 0,1,2,3": (
        "needs GPUs and a database; tests/distributed starts one, and workers on the simulator"
    ),
    "ppas tune live.yaml --server-url http://127.0.0.1:8000": "joins a server; tests/live/test_live_joined.py does",
}
ELSEWHERE = dict.fromkeys(("docs/terminal.md", "docs/ecosystem.md"), "tests/autotune/test_terminal_docs.py")
"""Pages whose commands another test runs."""
ENDS_WITH_1 = {"ppas doctor"}
"""Commands that say with exit code 1 that something is missing on this machine."""
_COMMAND = re.compile(r"(?:^|[\s;&|(])(?:\.venv/bin/)?(?:ppas|make) [\w-]")


def commands_of(page: Path) -> list[str]:
    """The commands in the page's code blocks, and those that it names with `.venv/bin/` in running text."""
    found, fence = [], None
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if mark := re.match(r" *(```+)(\w*)", line):
            fence = None if fence is not None else mark[2]
        elif fence not in (None, "", "console", "bash", "sh"):
            continue
        elif (fence is not None or line.startswith("    ")) and _COMMAND.search(line):
            found.append(" ".join(line.split("  #")[0].split()))
        elif fence is None:
            found += re.findall(r"`(\.venv/bin/ppas [^`]+)`", line)
    return [command.removeprefix(".venv/bin/").removeprefix("$ ") for command in found]


COMMANDS = {str(page.relative_to(ROOT)): commands_of(page) for page in PAGES}


def small(study: Path) -> None:
    """Makes a study file one that takes a second; the file as it stands is loaded by tests/test_docs.py."""
    keys: dict[str, Any] = yaml.safe_load(study.read_text(encoding="utf-8"))
    keys |= {"tuning_seeds": [0], "held_out_seeds": [100], "trials": 1, "random_arm": False, "sampler": "tpe"}
    for name in ("rates_per_s", "phases"):
        if name in keys["workload"]:
            keys["workload"][name] = keys["workload"][name][:2]
    study.write_text(yaml.safe_dump(keys), encoding="utf-8")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `runs/demo` of the demo's study, made small."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copy(ROOT / "examples/demo.yaml", folder / "demo.yaml")
    small(folder / "demo.yaml")
    found = CliRunner().invoke(app, ["tune", str(folder / "demo.yaml"), "--run", str(folder / "demo"), "--quiet"])
    assert found.exit_code == 0, found.output
    return folder / "demo"


def keep_key(path: Path) -> None:
    """What the two openssl commands of docs/signing.md make."""
    key = Ed25519PrivateKey.generate()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)


@pytest.fixture
def folder(finished: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """What a reader of the page has: the examples, traces, a profile, and finished runs but those that the page makes."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    write_trace(scale_time(rag_bursts(1.0, seed=0, prompt_tokens=4000), 6.0), tmp_path / "traffic.jsonl")
    turns = tuple(TraceRequest(20.0 * turn, 500 + 600 * turn, 32, session="a") for turn in range(3))
    write_trace(Trace("chats", turns), tmp_path / "chats.jsonl")
    row = {"input_length": 1000, "output_length": 20, "hash_ids": [1, 2]}
    rows = (json.dumps({"timestamp": 900 * place, **row}) for place in range(20))
    (tmp_path / "conversation_trace.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "mine.json").write_text(json.dumps(load_profile(DEFAULT_PROFILE).to_dict()))
    keep_key(tmp_path / "signing-key.pem")
    made = {
        Path(word).stem for command in COMMANDS[request.param] for word in command.split()[2:3] if " tune " in command
    }
    for name in {"demo", "my-study"} - made:
        shutil.copytree(finished, tmp_path / "runs" / name)
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "page"),
    [(page, page) for page, commands in COMMANDS.items() if set(commands) - set(NOT_RUN) and page not in ELSEWHERE],
    indirect=["folder"],
    ids=lambda page: page,
)
def test_the_commands_of_a_page_work_in_their_order(folder: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for command in COMMANDS[page]:
        if command in NOT_RUN:
            continue
        first, *words = shlex.split(command)
        assert first == "ppas", f"{command}: run it here, or list it in NOT_RUN with the reason"
        for file in {Path(word) for word in words if word.endswith(".yaml") and Path(word).exists()}:
            small(file)
        if "--trials" in words:
            words[words.index("--trials") + 1] = "2"
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 0 or (found.exit_code == 1 and command in ENDS_WITH_1), f"{command}\n{found.output}"


def test_what_is_not_run_stands_in_the_docs_and_names_a_test_that_exists() -> None:
    assert set(NOT_RUN) <= {command for commands in COMMANDS.values() for command in commands}
    for reason in (*NOT_RUN.values(), *ELSEWHERE.values()):
        for name in re.findall(r"(?:tests|docs)/[\w/]+\.\w+", reason):
            assert (ROOT / name).exists(), name


def test_a_page_that_another_test_runs_is_seen_whole_there() -> None:
    for page, test in ELSEWHERE.items():
        seen = re.findall(r"^ {4,}(ppas .+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert COMMANDS[page] == [" ".join(command.split()) for command in seen]
        assert page in (ROOT / test).read_text(encoding="utf-8")


def test_a_target_that_the_docs_name_is_one_of_the_makefile() -> None:
    targets = {command for commands in COMMANDS.values() for command in commands if command.startswith("make ")}
    texts = (page.read_text(encoding="utf-8") for page in PAGES)
    targets |= {target for text in texts for target in re.findall(r"`(make [a-z-]+)`", text)}
    for target in targets:
        assert (
            subprocess.run([*target.split(), "--dry-run"], cwd=ROOT, check=False, capture_output=True).returncode == 0
        )


@pytest.mark.parametrize("page", PAGES, ids=[path.stem for path in PAGES])
def test_a_command_in_running_text_has_the_options_that_it_is_named_with(page: Path) -> None:
    root: Any = typer.main.get_command(app)
    for command in re.findall(r"`(?:\.venv/bin/)?ppas ([^`]+)`", page.read_text(encoding="utf-8")):
        node, words = root, command.replace("\n", " ").split()
        while words and hasattr(node, "commands") and not words[0].startswith("-"):
            assert words[0].rstrip(",") in node.commands, f"ppas {command}"
            node = node.commands[words.pop(0).rstrip(",")]
        known = {"--help"} | {name for option in node.params for name in (*option.opts, *option.secondary_opts)}
        passed_on = command.split()[0] == "serve"
        for word in words:
            name = word.split("=")[0].rstrip("],.").lstrip("[")
            assert not re.fullmatch(r"--?[a-z][\w-]*", name) or name in known or passed_on, f"ppas {command}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("    ppas new a.yaml  # comment\n", ["ppas new a.yaml"]),
        ("```\n$ ppas new\n```\n", ["ppas new"]),
        ("    A=1 ppas new \\\n      --more\n", ["A=1 ppas new --more"]),
        ("    cd x && .venv/bin/ppas new\n", ["cd x && .venv/bin/ppas new"]),
        ("see `.venv/bin/ppas new` and `ppas old`\n", ["ppas new"]),
        ("```yaml\nppas: ppas new\n```\n    make new\n", ["make new"]),
    ],
)
def test_a_command_is_found_however_a_page_writes_it(text: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    assert commands_of(tmp_path / "page.md") == found


def test_the_study_files_that_are_run_small_are_whole_examples() -> None:
    assert all(load_spec(path).trials > 1 for path in (ROOT / "examples").glob("*.yaml"))
