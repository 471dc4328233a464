"""Exports with flags and model names that users do write: no secret goes out, and every word comes back as it was."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from test_export import STATIC, TUNED, results_of

from autotune.export import load_export, serve_lines, words_beside, write_export
from autotune.export.config_file import placed
from autotune.export.deploy import CHANGE_ME
from autotune.export.flags import HIDDEN, gpus, grouped, scrubbed, without_prefix_caching, without_secrets

STRANGE = [
    "--chat-template", "a\nb: {c}\n", "--x={{ .Values.y }}", "$(HOME) ${HOME} $$ $", "'\"`\\", "λ – 模型 🚀",
    "\u2028\x85\u200b\ufeff",
    "1e3", "08", "0o17", "yes", "y", "null", "~", "<<", "=", "- a", "# no comment", "&a *b !c", " before", "after ", "",
    "<b>&amp;", "2026-11-30", "%", "@", "\t", "x" * 300 + " " + "y" * 300, '{"a": 1}', "--", "\\",
]  # fmt: skip


def live(flags: list[str], model: str = "example/Model-3B", measured: str | None = None) -> dict[str, Any]:
    return {
        "measured_on": {
            "model": measured or model,
            "flags": flags,
            "server": {"vllm_version": "0.27.1", "flags": {"api_key": ["in-facts-s3cret"], "max_num_seqs": 8}},
        },
        "study": {"server": {"model": model, "flags": flags}},
    }


Said = list[tuple[str, tuple[str, ...]]]


def flags_of(folder: Path) -> dict[str, Said]:
    """The flags that the server gets from each file: as a YAML 1.1 and a 1.2 reader see them, variables replaced."""
    found = {}
    for reader in (yaml.safe_load_all, YAML(typ="safe", pure=True).load_all):
        service = next(reader((folder / "compose.yaml").read_text()))["services"]["vllm"]
        mounted = said(as_vllm_reads_it(next(reader((folder / "vllm.yaml").read_text()))))
        beside = said([word.replace("$$", "$") for word in service["command"][3:]])
        found[f"compose, {reader}"] = sorted(mounted + beside)
        config, deployment, _ = reader((folder / "kubernetes.yaml").read_text())
        mounted = said(as_vllm_reads_it(next(reader(config["data"]["vllm.yaml"]))))
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        beside = said([expanded(word) for word in container["args"][3:]])
        found[f"kubernetes, {reader}"] = sorted(mounted + beside)
        model = next(reader((folder / "helm-values.yaml").read_text()))["servingEngineSpec"]["modelSpec"][0]
        arguments = model["vllmConfig"]["extraArgs"]
        end = arguments.index("--max-num-batched-tokens")
        found[f"helm, {reader}"] = said([expanded(word) for word in arguments[:end]])
    return found


def as_vllm_reads_it(config: dict[str, Any]) -> list[str]:
    """The words that vLLM makes of a config file (`load_config_file` of 0.27.1), but for those of the setting itself."""
    words: list[str] = []
    for key, value in config.items():
        if key in ("max-num-batched-tokens", "max-num-seqs", "scheduler-cls", "additional-config"):
            continue
        if isinstance(value, bool):
            words += [f"--{key}"] if value else []
        elif isinstance(value, list):
            words += [f"--{key}", *(str(item) for item in value)] if value else []
        else:
            words += [f"--{key}", str(value)]
    return words


def said(words: list[str]) -> Said:
    """What the flags in `words` say, however they are spelt and in whichever order they stand."""
    return sorted((flag.name, flag.values) for flag in grouped(words))


def expanded(word: str) -> str:
    """A word of a container's command as Kubernetes passes it on where no variable is set."""
    return re.sub(r"\$(\$|\([^)]*\)|.|$)", lambda m: "$" if m[1] == "$" else m[0], word, flags=re.DOTALL)


@pytest.mark.parametrize(
    "flags",
    [
        ["--api_key", "s3cret"],
        ["--api-key", "s3cret", "s3cret-2", "s3cret-3"],
        ["--api_key=s3cret", "s3cret-2"],
        ["--api-k", "s3cret"],
        ["--hf_token", "s3cret"],
        ["--hf-t=s3cret"],
        ["--api-key", "-12345s3cret and more"],
        ["--api-key s3cret"],
        ["--ssl_keyfile_password", "s3cret"],
        ["--model_loader_extra_config.aws_secret_access_key", "s3cret"],
        ["--model-loader-extra-config", '{"storage": [{"secretAccessKey": "s3cret"}]}'],
        ['--kv-transfer-config={"kv_connector_extra_config": {"api_token": "s3cret"}}'],
        ["--otlp-traces-endpoint", "https://user:s3cret@traces.example/x"],
        ["--tool-server", "https://s3cret@tools.example"],
        ["--otlp_traces_endpoint=https://traces.example/?access_token=s3cret"],
        ["--some-plugin", "hf_s3cret" + "x" * 28],
        ["--some-plugin", "HF_TOKEN=s3cret"],
        ["--some-plugin", "Authorization: Bearer s3cret"],
        ["--download-dir", "https://models.example/x?X-Amz-Signature=s3cret&x=1"],
        ["--otlp-traces-endpoint", "https://traces.example/?api_key=s3cret"],
        ["--hf-overrides", "{'hf_token': 's3cret'}"],
    ],
    ids=lambda flags: " ".join(flags)[:40],
)
def test_a_secret_in_any_spelling_reaches_no_file_and_what_was_left_out_is_said(
    flags: list[str], tmp_path: Path
) -> None:
    around = ["--enforce-eager", *flags, "--max_model_len", "4096"]
    for file in write_export(results_of(TUNED, provenance=live(around)), tmp_path):
        assert "s3cret" not in file.read_text(), file
    for found in flags_of(tmp_path).values():
        assert found == [("--enforce-eager", ()), ("--max-model-len", ("4096",))]
    for name in ("compose.yaml", "kubernetes.yaml", "helm-values.yaml"):
        assert "Left out, since a file is no place for a secret: --" in (tmp_path / name).read_text()


def test_flags_that_only_sound_like_secrets_stay() -> None:
    words = [
        "--allow-credentials", "--ssl-keyfile", "/a/key.pem", "--return-tokens-as-token-ids", "--spec-tokens", "4",
        "--long_prefill_token_threshold", "4", "--api-server-count", "2", "--max-num-batched-tokens=8",
        "--hf-overrides", '{"classifier_from_token": ["no", "yes"], "pad_token": "<pad>", "cache_tokens": 3}',
        "--hf-config-path", "x", "--seed", "-3", "--otlp-traces-endpoint", "http://127.0.0.1:4317",
    ]  # fmt: skip
    assert without_secrets(words) == (tuple(words), ())


def test_the_settings_file_keeps_what_was_measured_on_but_for_its_secrets(tmp_path: Path) -> None:
    measured = {
        "model": "example/Model-3B",
        "flags": ["--api-key", "a-s3cret", "--hf_token=b-s3cret", "--seed", "3"],
        "wrapper": ["env", "HF_TOKEN=c-s3cret", "nsys"],
        "environment": ["HF_TOKEN"],
        "url": "http://user:d-s3cret@127.0.0.1:8000",
        "server": {"flags": {"api_key": ["e-s3cret"], "seed": 3, "unparsed": "{'api_key': ['f-s3cret'], 'x': X(1)}"}},
        "seconds_per_token": 0.25,
    }
    write_export(results_of(TUNED, provenance={"measured_on": measured}), tmp_path)
    text = (tmp_path / "settings.json").read_text()
    assert "s3cret" not in text
    assert json.loads(text)["measured_on"] == {
        "model": "example/Model-3B",
        "flags": ["--api-key", HIDDEN, "--hf-token", HIDDEN, "--seed", "3"],
        "wrapper": ["env", f"HF_TOKEN={HIDDEN}", "nsys"],
        "environment": ["HF_TOKEN"],
        "url": f"http://{HIDDEN}@127.0.0.1:8000",
        "server": {"flags": {"api_key": HIDDEN, "seed": 3, "unparsed": HIDDEN}},
        "seconds_per_token": 0.25,
    }


@given(st.lists(st.text(max_size=12) | st.sampled_from(["--api-key", "--api_key=", "-tp", "--a b", "-1"]), max_size=8))
@settings(max_examples=300, deadline=None)
def test_any_words_are_grouped_without_loss_and_scrubbing_again_changes_nothing(words: list[str]) -> None:
    assert [word for flag in grouped(words) for word in flag.words] == words
    assert gpus(words) >= 1
    once = scrubbed(words)
    assert scrubbed(once) == once


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (["--tensor_parallel_size", "2"], 2),
        (["--tensor-parallel-size=2", "-pp", "3"], 6),
        (["-tp=2", "--pipeline_parallel_size=2", "--data_parallel_size", "2"], 8),
        (["-tp", "2", "-dp", "4", "--data-parallel-size-local", "2"], 4),
        (["--tensor-parallel-size", "2", "--tensor_parallel_size", "4"], 4),
        (["--tensor", "2", "-dp=2", "-pcp", "2"], 8),
        (["--tensor-parallel-size", "many", "-dpp", "13345", "-dcp", "4", "--seed", "7"], 1),
        (["--chat-template", "-tp 8", "-pp", "0"], 1),
    ],
)
def test_gpus_are_those_of_all_parallel_sizes_in_any_spelling(flags: list[str], count: int, tmp_path: Path) -> None:
    write_export(results_of(STATIC, provenance=live(flags)), tmp_path)
    service = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]["vllm"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == count
    pod = list(yaml.safe_load_all((tmp_path / "kubernetes.yaml").read_text()))[1]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == str(count)
    values = yaml.safe_load((tmp_path / "helm-values.yaml").read_text())
    assert values["servingEngineSpec"]["modelSpec"][0]["requestGPU"] == count


@pytest.mark.parametrize("flag", ["--no_enable_prefix_caching", "--no-enable-prefix-caching", "--no-enable-prefix"])
def test_helm_switches_prefix_caching_off_however_the_flag_is_spelt(flag: str) -> None:
    assert without_prefix_caching(["--seed", "1", flag]) == (["--seed", "1"], False)
    assert without_prefix_caching([flag, "--enable_prefix_caching"]) == ([], True)


def test_every_strange_word_of_a_flag_comes_out_of_every_file_as_it_was(tmp_path: Path) -> None:
    write_export(results_of(TUNED, provenance=live(STRANGE)), tmp_path)
    for where, found in flags_of(tmp_path).items():
        assert found == said(STRANGE), where


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_words_of_flags_come_out_of_every_file_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, flags: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("export")
    write_export(results_of(STATIC, provenance=live(flags)), folder)
    for where, found in flags_of(folder).items():
        assert found == said(flags), where


STRANGE_FLAGS = [word for number, text in enumerate(STRANGE) for word in (f"--x{number}", text)]


def test_every_strange_value_that_a_config_file_can_say_stands_in_it(tmp_path: Path) -> None:
    found = placed(STRANGE_FLAGS)
    assert [flag.name for flag in found.beside] == ["--"], "which ends the flags, and is no value of one"
    write_export(results_of(TUNED, provenance=live(STRANGE_FLAGS)), tmp_path)
    for where, flags in flags_of(tmp_path).items():
        assert flags == said(STRANGE_FLAGS), where


@pytest.mark.parametrize(
    ("flags", "entries", "beside"),
    [
        (["--kv-cache-memory-bytes", "200000000"], {"kv-cache-memory-bytes": 200000000}, []),
        (["--max_model_len=8k", "--enforce-eager"], {"max-model-len": "8k", "enforce-eager": True}, []),
        (["-tp", "2", "-ep"], {"tensor-parallel-size": 2, "enable-expert-parallel": True}, []),
        (["-O3", "-tp=4"], {"tensor-parallel-size": 4}, ["-O3"]),
        (["--seed", "08", "--temperature", "0.90"], {"seed": "08", "temperature": "0.90"}, []),
        (["--lora-modules", "a=b", "c=d"], {"lora-modules": ["a=b", "c=d"]}, []),
        (["--middleware", "a", "--middleware=b"], {}, ["--middleware", "a", "--middleware=b"]),
        (["-tp", "2", "--tensor-parallel-size", "4"], {}, ["-tp", "2", "--tensor-parallel-size", "4"]),
        (["--chat-template=-x", "--seed", "-1"], {"seed": -1}, ["--chat-template=-x"]),
        (["--host", "192.0.2.1", "--port=9", "--max_num_seqs", "4"], {}, []),
        (["--max-num-s", "4", "--max_num_b=9", "--scheduler-c", "x", "--por", "9"], {}, []),
        (["--hf-overrides.pad_token", "<pad>"], {"hf-overrides.pad_token": "<pad>"}, []),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_flag_stands_in_the_config_file_where_one_can_say_it_and_else_in_the_command(
    flags: list[str], entries: dict[str, Any], beside: list[str], tmp_path: Path
) -> None:
    write_export(results_of(STATIC, provenance=live([*flags, "--api-key", "s3cret"])), tmp_path)
    config = yaml.safe_load((tmp_path / "vllm.yaml").read_text())
    assert config == {"max-num-batched-tokens": 2048, "max-num-seqs": 64, **entries}
    command = shlex.join(["serve", "example/Model-3B", "--config", "vllm.yaml", *beside])
    assert f" ppas {command}\n" in (tmp_path / "README.md").read_text()
    assert words_beside([*flags, "--api-key", "s3cret"]) == (*beside, "--api-key", "s3cret")


def test_the_users_own_additional_config_stays_beside_our_settings(tmp_path: Path) -> None:
    file = write_export(
        results_of(TUNED, provenance=live(["--additional-config", '{"mine": 1, "ppas": 2}'])), tmp_path
    )[0]
    assert yaml.safe_load(file.read_text())["additional-config"] == {"mine": 1, "ppas": TUNED.to_dict()}
    assert load_export(file) == TUNED


def test_of_a_joined_or_a_simulated_server_it_is_said_that_its_flags_are_not_known(tmp_path: Path) -> None:
    joined = live([])
    joined["study"]["server"]["url"] = "http://127.0.0.1:8000"
    write_export(results_of(TUNED, provenance=joined), tmp_path / "joined")
    write_export(results_of(TUNED, provenance={}), tmp_path / "simulated")
    for name in ("vllm.yaml", "README.md"):
        assert (
            "a server that somebody else started, whose flags it does not know"
            in (tmp_path / "joined" / name).read_text()
        )
        assert "No server was measured" in (tmp_path / "simulated" / name).read_text()
    assert "ppas serve MODEL --config vllm.yaml\n" in (tmp_path / "simulated/README.md").read_text()


TRYING = ["--load-format=dummy", "--skip_tokenizer_init", "--enforce-eager"]


def test_flags_with_which_no_user_is_served_are_said_in_every_file_that_has_them(tmp_path: Path) -> None:
    write_export(results_of(TUNED, provenance=live(TRYING)), tmp_path)
    names = [
        "README.md",
        "vllm.yaml",
        "ppas.env",
        "vllm-0.27.1.env",
        "compose.yaml",
        "kubernetes.yaml",
        "helm-values.yaml",
    ]
    for name in names:
        text = (tmp_path / name).read_text()
        assert "Random weights (load-format dummy): for trying things out, not for production." in text, name
        assert "and refuses text." in text, name
        assert "without CUDA graphs (enforce-eager)" in text, name
    assert load_export(tmp_path / "vllm.yaml") == TUNED
    lines = serve_lines(results_of(TUNED, provenance=live(TRYING)), Path("vllm.yaml"))
    assert "not for production" in lines[1]
    assert '"prompt": [1, 2, 3]' in (tmp_path / "README.md").read_text(), "a request that such a server answers"


@pytest.mark.parametrize(
    "flags",
    [[], ["--load-format", "dummy", "--load-format", "auto"], ["--enforce-eager", "--no-enforce-eager"]],
)
def test_a_server_that_serves_anybody_is_warned_of_nowhere(flags: list[str], tmp_path: Path) -> None:
    for file in write_export(results_of(TUNED, provenance=live([*flags, "--api-key", "s3cret"])), tmp_path):
        assert not re.search("not for production|refuses text|CUDA graphs", file.read_text()), file.name
    readme = (tmp_path / "README.md").read_text()
    assert '-H "Authorization: Bearer $API_KEY" -d \'{"prompt": "Once upon a time"' in readme


def args_of(folder: Path) -> list[str]:
    pod: dict[str, Any] = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))[1]
    args: list[str] = pod["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


@pytest.mark.parametrize("model", ["gpt2", "models/mine"])
def test_a_model_called_as_a_hub_calls_them_is_a_name_or_a_folder_whatever_lies_here(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for name in ("without", "with"):
        here = tmp_path / name
        here.mkdir()
        monkeypatch.chdir(here)
        if name == "with":
            (here / model).mkdir(parents=True)
        write_export(results_of(STATIC, provenance=live([], model)), here / "export")
        texts.append((here / "export/kubernetes.yaml").read_text())
        assert args_of(here / "export")[0] == model
        assert f"${{MODEL:-{model}}}" in (here / "export/compose.yaml").read_text()
    assert texts[0] == texts[1], "the folder where an export is written is no fact about the study"
    assert f"The study calls its model {model}: a name, or a folder of that name where it ran" in texts[0]


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_study_that_records_whether_its_model_was_a_folder_leaves_no_doubt(is_folder: bool, tmp_path: Path) -> None:
    provenance = live([], "models/mine")
    provenance["measured_on"]["model_is_folder"] = is_folder
    write_export(results_of(STATIC, provenance=provenance), tmp_path)
    readme, pods = (tmp_path / "README.md").read_text(), (tmp_path / "kubernetes.yaml").read_text()
    assert "it does not record which" not in readme + pods
    assert args_of(tmp_path)[0] == (CHANGE_ME if is_folder else "models/mine")
    assert f"ppas serve {'MODEL' if is_folder else 'models/mine'} --config vllm.yaml\n" in readme
    seen = "MODEL is the path of the model's folder: models/mine, seen from the folder where the study ran."
    assert (seen in readme) is is_folder
    assert ("mount the folder" in (tmp_path / "compose.yaml").read_text()) is is_folder


def test_the_command_that_is_printed_works_here_or_says_from_where_the_folder_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = results_of(STATIC, provenance=live([], "mine", "studies/mine"))
    monkeypatch.chdir(tmp_path)
    away = serve_lines(results, Path("run/export/vllm.yaml"))
    (tmp_path / "studies/mine").mkdir(parents=True)
    here = serve_lines(results, Path("run/export/vllm.yaml"))
    assert here == ["ppas serve studies/mine --config run/export/vllm.yaml"]
    assert away[0] == "ppas serve MODEL --config run/export/vllm.yaml"
    assert "studies/mine, seen from the folder where the study ran" in away[1]


@pytest.mark.parametrize(
    ("model", "measured"),
    [
        ("models/mine", "studies/models/mine"),
        ("/models/mine", None),
        ("./mine", None),
        ("a/b/c", None),
        ("two\nlines", None),
        ('it\'s "mine"', None),
        ("{{ .Values.x }}", None),
        ("${HOME}/x", None),
        ("modèle/λ", None),
        ("mine}", None),
        ("٣/٣", None),
    ],
)
def test_a_model_that_can_only_be_a_folder_is_a_placeholder_that_says_so(
    model: str, measured: str | None, tmp_path: Path
) -> None:
    write_export(results_of(STATIC, provenance=live([], model, measured)), tmp_path)
    assert args_of(tmp_path)[0] == CHANGE_ME
    for name in ("kubernetes.yaml", "helm-values.yaml"):
        assert "the model, which the study read from a folder." in (tmp_path / name).read_text()
    command = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]["vllm"]["command"]
    assert command[0] == "${MODEL:?name the model}"
    assert json.loads((tmp_path / "settings.json").read_text())["measured_on"]["model"] == (measured or model)


def test_a_study_that_names_no_model_is_not_said_to_have_read_a_folder(tmp_path: Path) -> None:
    write_export(results_of(STATIC, provenance={"measured_on": None, "study": []}), tmp_path)
    text = (tmp_path / "kubernetes.yaml").read_text()
    assert "the model, which the study does not name." in text
    assert "folder" not in text


def test_a_version_in_other_digits_is_no_tag(tmp_path: Path) -> None:
    measured = {"measured_on": {"model": "a/b", "vllm_version": "٠.٢٧.١"}}
    write_export(results_of(TUNED, provenance=measured), tmp_path)
    assert "ARG VLLM_VERSION\n" in (tmp_path / "Dockerfile").read_text()
