"""What the tuner installs, under which licences, and with which known vulnerabilities.

    python scripts/audit.py                      lists licences, asks for vulnerabilities; exit code 1 where either is bad
    python scripts/audit.py --strict             the same, and 1 too where a package could not be audited
    python scripts/audit.py --sbom build/X.json  writes a CycloneDX bill of materials of the same packages instead

Both tools look at the environment that runs this script: cyclonedx-py for what packages declare, pip-audit for
vulnerabilities. Neither knows which extras are asked for, so the packages are gathered here: all that
`ppas-autotune[tune,live,distributed,sign]` needs, and nothing of the tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from license_expression import LicenseExpression, get_spdx_licensing
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "ppas-autotune"
EXTRAS = ("tune", "live", "distributed", "sign")

PERMISSIVE = frozenset(
    {
        "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT",
        "MIT-0", "PSF-2.0", "Python-2.0", "Zlib",
        "License :: OSI Approved :: Apache Software License",
        "License :: OSI Approved :: BSD License",
        "License :: OSI Approved :: MIT License",
    }
)  # fmt: skip
"""Licences, by SPDX name or by classifier, that ask for nothing but their notice."""
KNOWN = {
    "tqdm": {"MPL-2.0"},  # Optuna's; used unchanged
    "psycopg": {"LGPL-3.0-only"},  # the PostgreSQL driver, of the extra `distributed`; imported, not copied
    "psycopg-binary": {"LGPL-3.0-only"},
    "protobuf": {"nothing"},  # says "3-Clause BSD License", no SPDX name, so cyclonedx-py leaves it out
}
"""Licences that ask for more, each taken for one package alone."""
_TIMEOUT_S = 90


def main() -> int:
    """Runs what the arguments ask for; returns the exit code."""
    parser = argparse.ArgumentParser(description="Licences, vulnerabilities and bill of materials of the tuner.")
    parser.add_argument("--sbom", type=Path, metavar="FILE", help="write a CycloneDX bill of materials, and no more")
    parser.add_argument("--strict", action="store_true", help="fail where a package could not be audited")
    asked = parser.parse_args()
    packages = closure(wanted())
    bill = bill_of_materials(packages)
    if asked.sbom is not None:
        write_bill(bill, asked.sbom)
        print(f"{asked.sbom}: {len(packages)} packages")
        return 0
    listed, surprises = licences(bill)
    print(f"Licences that {len(packages)} packages declare:")
    for licence, names in listed.items():
        print(f"  {licence}: {', '.join(names)}")
    for surprise in surprises:
        print(
            f"NOT ALLOWED: {surprise}; look at it, then add it to KNOWN in scripts/audit.py, or do without the package"
        )
    known, unknown = vulnerabilities(packages)
    for line in [*known, *unknown]:
        print(line)
    if not known and not unknown:
        print(f"No known vulnerability in {len(packages)} packages.")
    return int(bool(surprises or known or (asked.strict and unknown)))


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for under EXTRAS; the installed metadata may be older."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    pending, seen, found = list(EXTRAS), set(), []
    while pending:
        if (extra := pending.pop()) in seen:
            continue
        seen.add(extra)
        for text in extras[extra]:
            requirement = Requirement(text)
            if requirement.name == PROJECT:
                pending += requirement.extras
            else:
                found.append(requirement)
    return found


def closure(requirements: Iterable[Requirement]) -> dict[str, set[str]]:
    """Every package that these need here, and which of them each needs itself."""
    needs: dict[str, set[str]] = defaultdict(set)
    pending, seen = list(requirements), set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        needs[name] |= set()
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in distribution(name).requires or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    needs[name].add(canonicalize_name(needed.name))
                    pending.append(needed)
    return dict(needs)


def bill_of_materials(packages: Mapping[str, set[str]]) -> dict[str, Any]:
    """What cyclonedx-py reads in this environment, of these packages alone, as CycloneDX 1.6."""
    command = [_beside("cyclonedx-py"), "environment", "--pyproject", str(ROOT / "pyproject.toml"), "--no-validate"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "bill.json"
        done = subprocess.run(
            [*command, "--spec-version", "1.6", "-o", str(target), sys.executable], stderr=subprocess.PIPE
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        bill: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    kept = {canonicalize_name(part["name"]): part for part in bill["components"]}
    missing = packages.keys() - kept.keys()
    assert not missing, f"cyclonedx-py does not see {sorted(missing)}"
    bill["components"] = [kept[name] for name in sorted(packages)]
    own = bill["metadata"]["component"]
    own["version"] = _version()
    tops = {canonicalize_name(requirement.name) for requirement in wanted()}
    bill["dependencies"] = [
        {"ref": own["bom-ref"], "dependsOn": sorted(kept[name]["bom-ref"] for name in tops & packages.keys())},
        *(
            {"ref": kept[name]["bom-ref"], "dependsOn": sorted(kept[other]["bom-ref"] for other in packages[name])}
            for name in sorted(packages)
        ),
    ]
    return bill


def write_bill(bill: dict[str, Any], target: Path) -> None:
    """Writes the bill once CycloneDX's own schema has accepted it."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = json.dumps(bill, indent=2) + "\n"
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert problem is None, f"no valid bill of materials: {problem}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def licences(bill: Mapping[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """Packages by what they declare, and those whose licence is not allowed or not told."""
    listed: dict[str, list[str]] = defaultdict(list)
    surprises = []
    for part in bill["components"]:
        name = canonicalize_name(part["name"])
        declared = list(_declared(part)) or ["nothing"]
        for licence in declared:
            listed[licence].append(name)
        if not all(allowed(licence, name) for licence in declared):
            surprises.append(f"{name} declares {' and '.join(declared)}")
    return dict(sorted(listed.items())), surprises


def allowed(licence: str, package: str) -> bool:
    """Whether the package may be used under what it declares: all parts of an AND, one of an OR."""
    accepted = PERMISSIVE | KNOWN.get(package, set())
    if licence in accepted:
        return True
    try:
        expression = get_spdx_licensing().parse(licence, validate=True)
    except Exception:  # noqa: BLE001 - the library raises several kinds of its own; none of them is a licence
        return False
    return _holds(expression, accepted)


def _holds(expression: LicenseExpression, accepted: frozenset[str]) -> bool:
    match getattr(expression, "operator", None):
        case " AND ":
            return all(_holds(part, accepted) for part in expression.args)
        case " OR ":
            return any(_holds(part, accepted) for part in expression.args)
    return str(expression) in accepted


def _declared(part: Mapping[str, Any]) -> Iterator[str]:
    for entry in part.get("licenses", []):
        licence = entry.get("license", {})
        text = entry.get("expression") or licence.get("id") or licence.get("name")
        if text:
            yield " ".join(text.split())[:120]


def vulnerabilities(packages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Known vulnerabilities, and what could not be audited with the reason, as lines for people."""
    pinned = "".join(f"{name}=={distribution(name).version}\n" for name in sorted(packages))
    command = [_beside("pip-audit"), "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pinned.txt"
        file.write_text(pinned, encoding="utf-8")
        try:
            done = subprocess.run(
                [*command, "-r", str(file)], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return [], [f"not audited: pip-audit gave no answer within {_TIMEOUT_S} s"]
    return read_audit(done.stdout, done.stderr)


def read_audit(answer: str, said: str) -> tuple[list[str], list[str]]:
    """As `vulnerabilities`, from what pip-audit printed on stdout and stderr.

    pip-audit ends with 0 and "No known vulnerabilities found" also where its service knew none of the packages.
    """
    try:
        entries = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        return [], [f"not audited: {last[:300]}"]
    known = [
        f"VULNERABLE: {entry['name']} {entry['version']}: {found['id']}, "
        f"fixed in {', '.join(found['fix_versions']) or 'no release'}"
        for entry in entries
        for found in entry.get("vulns", [])
    ]
    skipped = {entry["name"]: entry["skip_reason"] for entry in entries if "skip_reason" in entry}
    if not skipped:
        return known, [] if entries else ["not audited: pip-audit looked at no package"]
    name, reason = next(iter(skipped.items()))
    return known, [f"not audited: {len(skipped)} of {len(entries)} packages, such as {name}: {reason}"]


def _version() -> str:
    sys.path.insert(0, str(ROOT))
    from ppas_core import __version__

    return __version__


def _beside(tool: str) -> str:
    return str(Path(sys.executable).with_name(tool))


if __name__ == "__main__":
    sys.exit(main())
