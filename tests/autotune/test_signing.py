"""A signed export: what the key vouches for is found changed, also where all digests were made anew."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner, Result

from autotune.cli import app
from autotune.export.common import SIGNATURE_FILE
from autotune.runfolder import RunFolder
from autotune.signing.keys import PASSPHRASE_VARIABLE, load_public_key, load_signer
from autotune.verify import Verification, verify
from ppas_core.errors import InvalidInput

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
OPENSSH = serialization.PrivateFormat.OpenSSH
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo


def write_key(path: Path, *, form: serialization.PrivateFormat = PKCS8, passphrase: str | None = None) -> Path:
    """A new private key in `path`, readable by us alone, and its public one beside it, with `.pub`."""
    return keep(path, Ed25519PrivateKey.generate(), form, passphrase)


def keep(path: Path, key: Any, form: serialization.PrivateFormat = PKCS8, passphrase: str | None = None) -> Path:
    lock = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(PEM, form, lock))
    path.with_name(f"{path.name}.pub").write_bytes(key.public_key().public_bytes(PEM, SPKI))
    return path


def ppas(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def checked(path: Path, key: Path) -> Verification:
    return verify(path, load_public_key(key.with_name(f"{key.name}.pub")))


def findings(path: Path, key: Path) -> set[tuple[str, str]]:
    return {(finding.what, finding.path) for finding in checked(path, key).findings}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_key(tmp_path_factory.mktemp("keys") / "key.pem")


@pytest.fixture(scope="module")
def signed_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory, key: Path) -> Path:
    run = Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("signed") / "run"))
    done = ppas("export", run, "--sign", key)
    assert done.exit_code == 0, done.output
    assert SIGNATURE_FILE in done.output
    return run


@pytest.fixture
def run(signed_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(signed_run, tmp_path / "run"))


def test_a_signed_run_and_its_export_elsewhere_hold_and_say_who_signed_what(
    signed_run: Path, key: Path, tmp_path: Path
) -> None:
    public = key.with_name("key.pem.pub")
    told = ppas("verify", signed_run, "--key", public)
    assert told.exit_code == 0, told.output
    assert f"signed by {load_public_key(public).keyid}" in " ".join(told.output.split())
    taken = Path(shutil.copytree(signed_run / "export", tmp_path / "taken"))
    shown = ppas("verify", taken, "--key", public, "--json")
    assert shown.exit_code == 0, shown.output
    (signed,) = json.loads(shown.stdout)["signed"]
    assert set(signed["files"]) == {file.name for file in taken.iterdir()} - {SIGNATURE_FILE}
    assert signed["study"] == "small"
    assert verify(signed_run).findings == ()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which checks the signature here, is missing")
def test_openssl_finds_the_signature_good_over_the_envelope_that_the_dsse_specification_describes(
    signed_run: Path, key: Path, tmp_path: Path
) -> None:
    envelope = json.loads((signed_run / "export" / SIGNATURE_FILE).read_text())
    kind, payload = envelope["payloadType"].encode(), base64.b64decode(envelope["payload"])
    message, signature = tmp_path / "message", tmp_path / "signature"
    message.write_bytes(b"DSSEv1 " + b" ".join([b"%d" % len(kind), kind, b"%d" % len(payload), payload]))
    signature.write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", key.with_name("key.pem.pub"), "-rawin"]
    found = subprocess.run([*command, "-in", message, "-sigfile", signature], check=False, capture_output=True)
    assert found.returncode == 0, found.stdout + found.stderr
    statement = json.loads(payload)
    assert (kind, statement["_type"]) == (b"application/vnd.in-toto+json", "https://in-toto.io/Statement/v1")
    for subject in statement["subject"]:
        content = (signed_run / "export" / subject["name"]).read_bytes()
        assert subject["digest"] == {"sha256": hashlib.sha256(content).hexdigest()}


def test_a_folder_that_was_rewritten_with_all_its_digests_is_found_by_the_signature_alone(run: Path, key: Path) -> None:
    metrics = run / "trials" / "1" / "metrics.json"
    metrics.write_text(metrics.read_text().replace("duration_s", "duration_x", 1))
    kept = (run / "export" / SIGNATURE_FILE).read_bytes()
    assert ppas("export", run).exit_code == 0  # every digest anew, as somebody would who has no key
    assert verify(run).findings == ()
    assert findings(run, key) == {("missing", f"export/{SIGNATURE_FILE}")}
    (run / "export" / SIGNATURE_FILE).write_bytes(kept)
    assert ("broken", "manifest.json") in findings(run, key)


def test_an_export_of_another_setting_with_fitting_digests_is_not_what_was_signed(run: Path, key: Path) -> None:
    kept = (run / "export" / SIGNATURE_FILE).read_bytes()
    assert ppas("export", run, "--trial", "2", "--output", run / "export").exit_code == 0
    (run / "export" / SIGNATURE_FILE).write_bytes(kept)
    assert verify(run).findings == ()
    assert {("changed", "export/settings.json"), ("changed", "export/vllm.yaml")} <= findings(run, key)
    assert {("changed", "settings.json"), ("changed", "vllm.yaml")} <= findings(run / "export", key)


def test_edited_lost_and_added_files_of_a_signed_export_are_told(run: Path, key: Path, tmp_path: Path) -> None:
    taken = Path(shutil.copytree(run / "export", tmp_path / "taken"))
    (taken / "vllm.yaml").write_text((taken / "vllm.yaml").read_text() + "trust-remote-code: true\n")
    (taken / "compose.yaml").unlink()
    (taken / "compose.override.yaml").write_text("services: {}\n")
    assert findings(taken, key) == {
        ("changed", "vllm.yaml"),
        ("missing", "compose.yaml"),
        ("added", "compose.override.yaml"),
    }


def test_an_export_without_signature_beside_a_signed_one_is_told(run: Path, key: Path) -> None:
    assert ppas("export", run, "--trial", "2").exit_code == 0
    assert findings(run, key) == {("missing", f"export-trial-2/{SIGNATURE_FILE}")}
    assert ppas("export", run, "--trial", "2", "--sign", key).exit_code == 0
    assert findings(run, key) == set()


def test_an_export_written_elsewhere_is_signed_there_and_leaves_the_runs_own_alone(
    run: Path, key: Path, tmp_path: Path
) -> None:
    before = (run / "export" / SIGNATURE_FILE).read_bytes()
    assert ppas("export", run, "--trial", "1", "--output", tmp_path / "out", "--sign", key).exit_code == 0
    assert findings(tmp_path / "out", key) == findings(run, key) == set()
    assert (run / "export" / SIGNATURE_FILE).read_bytes() == before


def test_a_report_that_is_written_again_leaves_the_signature_good(run: Path, key: Path) -> None:
    assert ppas("report", run).exit_code == 0
    assert findings(run, key) == set()


def test_another_key_signs_for_nobody(run: Path, tmp_path: Path) -> None:
    other = write_key(tmp_path / "other.pem")
    found = ppas("verify", run, "--key", other.with_name("other.pem.pub"))
    assert found.exit_code == 1
    assert "is signed by SHA256:" in " ".join(found.output.split())


def _payload(envelope: dict[str, Any]) -> None:
    statement = json.loads(base64.b64decode(envelope["payload"]))
    statement["predicate"]["label"] = "another"
    envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()


def _signature(envelope: dict[str, Any]) -> None:
    envelope["signatures"][0]["sig"] = base64.b64encode(bytes(64)).decode()


@pytest.mark.parametrize(
    "change",
    [
        _payload,
        _signature,
        lambda envelope: envelope.update(payloadType="text/plain"),
        lambda envelope: envelope.update(signatures=[]),
        lambda envelope: envelope["signatures"].append(envelope["signatures"][0] | {"sig": "AA=="}),
        lambda envelope: envelope.update(payload=7),
        lambda envelope: envelope.pop("payloadType"),
        lambda envelope: envelope["signatures"][0].update(sig="AA=="),
        lambda envelope: envelope["signatures"][0].update(keyid=None),
        lambda envelope: envelope.update(payloadType=7),
        lambda envelope: envelope.update(payloadType="\ud800"),
    ],
    ids=[
        "payload",
        "signature",
        "type",
        "unsigned",
        "twice",
        "number",
        "incomplete",
        "short",
        "nameless",
        "typeless",
        "half",
    ],
)
def test_a_changed_envelope_counts_for_nothing(
    run: Path, key: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    file = run / "export" / SIGNATURE_FILE
    envelope = json.loads(file.read_text())
    change(envelope)
    file.write_text(json.dumps(envelope))
    found = checked(run, key)
    assert {(finding.what, finding.path) for finding in found.findings} == {("broken", f"export/{SIGNATURE_FILE}")}
    assert found.signed == ()


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b" " * 5_000_000])
def test_a_signature_file_that_holds_something_else_is_a_finding(run: Path, key: Path, content: bytes) -> None:
    (run / "export" / SIGNATURE_FILE).write_bytes(content)
    assert findings(run, key) == {("broken", f"export/{SIGNATURE_FILE}")}


@pytest.mark.parametrize(
    "payload",
    [
        b"hello",
        b"[]",
        json.dumps({"_type": "https://in-toto.io/Statement/v1", "predicateType": "other", "predicate": {}}).encode(),
    ],
)
def test_what_the_key_signed_for_another_purpose_is_no_signature_of_an_export(
    run: Path, key: Path, payload: bytes
) -> None:
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, "application/vnd.in-toto+json", {})
    envelope.sign(load_signer(key))
    (run / "export" / SIGNATURE_FILE).write_text(json.dumps(envelope.to_dict()))
    assert [finding.reason for finding in checked(run, key).findings] == [
        "the key signed something else than an export"
    ]


@pytest.mark.parametrize("name", ["../vllm.yaml", "/dev/zero", "nul\0byte", "\ud800", 7])
def test_a_statement_that_names_no_file_of_the_export_vouches_for_nothing(run: Path, key: Path, name: object) -> None:
    from securesystemslib.dsse import Envelope

    file = run / "export" / SIGNATURE_FILE
    statement = json.loads(base64.b64decode(json.loads(file.read_text())["payload"]))
    statement["subject"].append({"name": name, "digest": {"sha256": "0"}})
    envelope = Envelope(json.dumps(statement).encode(), "application/vnd.in-toto+json", {})
    envelope.sign(load_signer(key))
    file.write_text(json.dumps(envelope.to_dict()))
    assert [finding.reason for finding in checked(run, key).findings] == [
        "the key signed something else than an export"
    ]


def test_a_run_that_was_changed_is_told_of_its_export_too(run: Path, key: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["files"]["trials/1/metrics.json"] = "sha256:0"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert findings(run / "export", key) == {("broken", "../manifest.json")}


def test_a_link_to_a_folder_and_a_pipe_that_joined_a_signed_export_are_told(run: Path, key: Path) -> None:
    (run / "export" / "linked").symlink_to(run / "traces")
    os.mkfifo(run / "export" / "pipe")
    assert {("added", "linked"), ("added", "pipe")} <= findings(run / "export", key)


def test_a_run_folder_that_is_not_as_recorded_is_not_signed_and_not_touched(run: Path, key: Path) -> None:
    (run / "trials" / "1" / "metrics.json").write_text("{}")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    refused = ppas("export", run, "--sign", key)
    assert refused.exit_code == 2
    assert "trials/1/metrics.json" in refused.output
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("form", [PKCS8, OPENSSH], ids=["pem", "openssh"])
def test_a_key_with_a_passphrase_opens_with_it_alone(
    tmp_path: Path, form: serialization.PrivateFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = write_key(tmp_path / "locked", form=form, passphrase="open sesame")  # noqa: S106 - a test's
    monkeypatch.delenv(PASSPHRASE_VARIABLE, raising=False)
    with pytest.raises(InvalidInput, match=f"is encrypted; give its passphrase in {PASSPHRASE_VARIABLE}"):
        load_signer(locked)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "open barley")
    with pytest.raises(InvalidInput, match="wrong PPAS_KEY_PASSPHRASE") as wrong:
        load_signer(locked)
    assert "barley" not in str(wrong.value)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "open sesame")
    assert load_signer(locked).public_key.keyid == load_public_key(tmp_path / "locked.pub").keyid


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen, whose keys are read here, is missing")
def test_keys_of_ssh_keygen_are_read_and_called_as_it_calls_them(tmp_path: Path) -> None:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    told = subprocess.run(["ssh-keygen", "-lf", path], check=True, capture_output=True, text=True).stdout
    assert load_signer(path).public_key.keyid == told.split()[1]
    assert load_public_key(tmp_path / "key.pub").keyid == told.split()[1]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_private_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_key(tmp_path / "key")
    path.chmod(mode)
    with pytest.raises(InvalidInput, match=rf"mode {mode:04o}\); chmod 600"):
        load_signer(path)


def test_files_that_hold_no_such_key_are_refused_with_the_reason_and_without_what_is_in_them(tmp_path: Path) -> None:
    good = write_key(tmp_path / "good")
    curve = keep(tmp_path / "curve", generate_private_key(SECP256R1()))
    for name, content in {
        "damaged": good.read_bytes()[:60] + b"\n-----END PRIVATE KEY-----\n",
        "text": b"SECRETWORDS",
        "large": b" " * 70_000,
        "certificate": b"-----BEGIN CERTIFICATE-----\nSECRETWORDS\n-----END CERTIFICATE-----\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "good.pub").chmod(0o600)
    os.mkfifo(tmp_path / "pipe", 0o600)
    secret = [line for line in good.read_text().splitlines() if not line.startswith("-----")]
    for path, reason in {
        curve: r"another kind of key \(E.*\); allowed: Ed25519",
        tmp_path / "damaged": "damaged",
        tmp_path / "text": "holds no private key",
        tmp_path / "large": "larger than",
        tmp_path / "good.pub": "holds no private key",
        tmp_path / "nowhere": "No such file",
        tmp_path / "pipe": "no regular file",
        tmp_path: "no regular file",
        Path("nul\0byte"): "cannot be read",
    }.items():
        with pytest.raises(InvalidInput, match=reason) as refused:
            load_signer(path)
        assert not any(word in str(refused.value) for word in ["SECRETWORDS", *secret])
    (tmp_path / "two.pub").write_bytes(
        (tmp_path / "good.pub").read_bytes().rstrip() + b"\n" + (tmp_path / "curve.pub").read_bytes()
    )
    for path, reason in {
        tmp_path / "two.pub": "more than one key",
        tmp_path / "curve.pub": r"another kind of key \(E.*\); allowed: Ed25519",
        good: "is a private key",
        tmp_path / "text": "cannot be read as a public key",
        tmp_path / "certificate": "cannot be read as a public key",
        tmp_path / "large": "larger than",
        tmp_path / "nowhere": "No such file",
    }.items():
        with pytest.raises(InvalidInput, match=reason) as refused:
            load_public_key(path)
        assert not any(word in str(refused.value) for word in ["SECRETWORDS", *secret])


def test_nothing_of_the_private_key_is_in_what_signing_leaves_or_says(run: Path, key: Path) -> None:
    done = ppas("export", run, "--sign", key)
    secret = [line.encode() for line in key.read_text().splitlines() if not line.startswith("-----")]
    files = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert not any(word in content for word in secret for content in [done.output.encode(), *files])
    assert not any(str(key).encode() in content for content in files)


def test_without_the_signing_packages_digests_are_checked_and_a_key_names_what_to_install(
    signed_run: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("securesystemslib", "cryptography"):
        monkeypatch.setitem(sys.modules, package, None)
    assert ppas("verify", signed_run).exit_code == 0
    told = ppas("verify", signed_run, "--key", key.with_name("key.pem.pub"))
    assert told.exit_code == 2
    assert "pip install 'ppas-autotune[sign]'" in " ".join(told.output.split())


def test_tables_are_not_signed(run: Path, key: Path) -> None:
    assert ppas("export", run, "--results", "--sign", key).exit_code == 2


def test_a_manifest_without_files_was_not_signed(run: Path, key: Path) -> None:
    (run / "manifest.json").write_text('{"files": 1}')
    assert ("broken", "manifest.json") in findings(run, key)
    RunFolder(run).write_manifest()
    assert findings(run, key) == set()
