"""The audit counts what the tuner installs, stops at a licence nobody looked at, and never calls unaudited clean."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts/audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packages(audit: ModuleType) -> dict[str, set[str]]:
    found: dict[str, set[str]] = audit.closure(audit.wanted())
    return found


def test_packages_of_every_extra_are_counted_and_none_of_the_tests(packages: dict[str, set[str]]) -> None:
    assert {"optuna", "sqlalchemy", "aiohttp", "psycopg", "psycopg-binary", "grpcio", "cryptography", "bcrypt"} <= (
        packages.keys()
    )
    assert not {"pytest", "mypy", "vllm", "torch", "schemathesis", "ppas-autotune"} & packages.keys()
    assert all(needed in packages for needs in packages.values() for needed in needs)


def test_a_package_asked_for_with_and_without_an_extra_brings_what_the_extra_needs(audit: ModuleType) -> None:
    plain, extra = Requirement("psycopg"), Requirement("psycopg[binary]")
    assert "psycopg-binary" not in audit.closure([plain])
    assert "psycopg-binary" in audit.closure([plain, extra])
    assert "psycopg-binary" in audit.closure([extra, plain])


def test_every_licence_here_is_allowed_and_the_bill_of_materials_holds_every_package(
    audit: ModuleType, packages: dict[str, set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill = audit.bill_of_materials(packages)
    listed, surprises = audit.licences(bill)
    assert surprises == []
    assert {name for names in listed.values() for name in names} == packages.keys()
    audit.write_bill(bill, tmp_path / "build/sbom.json")
    written = json.loads((tmp_path / "build/sbom.json").read_text())
    assert (written["bomFormat"], written["metadata"]["component"]["name"]) == ("CycloneDX", "ppas-autotune")
    assert {part["name"].lower().replace("_", "-") for part in written["components"]} == packages.keys()
    assert all(part["version"] and part["purl"] for part in written["components"])
    assert str(ROOT) not in json.dumps(written)
    monkeypatch.setattr(audit, "PERMISSIVE", audit.PERMISSIVE - {"ISC"})
    assert audit.licences(bill)[1] == ["shellingham declares ISC"]


@pytest.mark.parametrize(
    ("licence", "package", "allowed"),
    [
        ("MIT", "any", True),
        ("Apache-2.0 AND MIT", "any", True),
        ("GPL-3.0-only OR MIT", "any", True),
        ("GPL-3.0-only AND MIT", "any", False),
        ("MIT AND (GPL-2.0-only OR AGPL-3.0-only)", "any", False),
        ("BSD-2-Clause AND Apache-2.0 WITH LLVM-exception", "any", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", "any", False),
        ("License :: OSI Approved :: BSD License", "any", True),
        ("License :: OSI Approved :: GNU General Public License v3 (GPLv3)", "any", False),
        ("MPL-2.0 AND MIT", "tqdm", True),
        ("MPL-2.0 AND MIT", "any", False),
        ("LGPL-3.0-only", "psycopg", True),
        ("nothing", "any", False),
        ("Proprietary, ask us", "any", False),
        ("MIT AND (", "any", False),
    ],
)
def test_a_licence_is_allowed_by_all_parts_of_an_and_and_one_of_an_or(
    audit: ModuleType, licence: str, package: str, allowed: bool
) -> None:
    assert audit.allowed(licence, package) is allowed


_CLEAN = {"name": "numpy", "version": "2.4.6", "vulns": []}
_SKIPPED = {"name": "scipy", "skip_reason": "not found"}
_BAD = {"name": "jinja2", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1"]}]}


@pytest.mark.parametrize(
    ("answer", "said", "known", "unknown"),
    [
        ({"dependencies": [_CLEAN]}, "", [], []),
        ({"dependencies": [_BAD, _CLEAN]}, "", ["VULNERABLE: jinja2 2.0: PYSEC-1, fixed in 3.1"], []),
        (
            {"dependencies": [_CLEAN, _SKIPPED]},
            "No known vulnerabilities found",
            [],
            ["not audited: 1 of 2 packages, such as scipy: not found"],
        ),
        ({"dependencies": []}, "No known vulnerabilities found", [], ["not audited: pip-audit looked at no package"]),
        ("", "Traceback\nConnectionError: no route", [], ["not audited: ConnectionError: no route"]),
        ("", "", [], ["not audited: it said nothing"]),
    ],
)
def test_what_was_not_audited_is_said_and_never_called_clean(
    audit: ModuleType, answer: object, said: str, known: list[str], unknown: list[str]
) -> None:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    assert audit.read_audit(text, said) == (known, unknown)


@pytest.mark.parametrize(
    ("found", "strict", "code"),
    [
        (([], []), False, 0),
        (([], ["not audited: 3 of 9"]), False, 0),
        (([], ["not audited: 3 of 9"]), True, 1),
        ((["VULNERABLE: a 1"], []), False, 1),
    ],
)
def test_a_vulnerability_ends_the_check_and_an_audit_that_could_not_be_only_where_asked(
    audit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: tuple[list[str], list[str]],
    strict: bool,
    code: int,
) -> None:
    monkeypatch.setattr(audit, "bill_of_materials", lambda _: {"components": [{"name": "a", "licenses": []}]})
    monkeypatch.setattr(audit, "KNOWN", {"a": {"nothing"}})
    monkeypatch.setattr(audit, "vulnerabilities", lambda _: found)
    monkeypatch.setattr(sys, "argv", ["audit.py", *(["--strict"] if strict else [])])
    assert audit.main() == code
    printed = capsys.readouterr().out
    assert all(line in printed for lines in found for line in lines)
    assert ("No known vulnerability" in printed) == (found == ([], []))
