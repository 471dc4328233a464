"""Who may take part in a shared study: those with the same plan, on a like machine.

The first process that registers sets the plan; every other one must have the same study, space, reference and traces, and
a machine that measures alike: model, flags, vLLM and GPU of a live study, the simulator's profile of a simulated one; and
the same release of this package, since another one may measure in another way. What two machines say of themselves may be
alike and what they measure not: `apart` compares their measurements of the reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from autotune import aggregate
from autotune.calibration.device import device_name
from autotune.export.common import sha256
from autotune.export.flags import scrubbed_words
from autotune.plan import Plan
from autotune.records import Origin
from autotune.runfolder import identity
from autotune.study import Outcome
from ppas_core import __version__
from ppas_core.errors import InvalidInput
from ppas_core.plain_json import dump_json, load_json

_OF_ONE_MACHINE: Final = ("url", "wrapper", "environment", "server_starts", "server", "model_is_folder")
"""What may differ between like machines: where the server is, and how it is started there."""
MOST_APART: Final = 2.0
"""The reference of a like machine measures at most this many times as much as the first worker's, or as little."""
_FACTS: Final = ("vllm_version", "max_model_len", "block_size")
_COUNT: Final = re.compile(r"\b\d+ x ")


def agreed_plan(plan: Plan) -> dict[str, Any]:
    """What all workers of the study must have in common, as plain JSON values."""
    parts = identity(plan)
    del parts["measured_on"]
    spec = parts.pop("spec")
    # Compared as resolved, or of one machine: files have the same requests under other names.
    for key in ("server", "reference", "space"):
        spec.pop(key, None)
    if spec["workload"]["family"] == "files":
        del spec["workload"]
    return {**{f"study.{key}": value for key, value in spec.items()}, **parts}


def fingerprint(plan: Plan) -> dict[str, Any]:
    """What must be alike where two workers measure, as plain JSON values; of a live study once its server was up."""
    told = plan.evaluator.describe()
    found = {"ppas": __version__} | {key: value for key, value in told.items() if key not in _OF_ONE_MACHINE}
    if "flags" in found:
        found["flags"] = scrubbed_words(found["flags"])
    if plan.evaluator.origin is Origin.LIVE:
        facts = told.get("server", {})
        found |= {key: facts.get(key) for key in _FACTS}
        if told.get("url") is None:
            found["gpu"] = _COUNT.sub("", device_name())
    plain: dict[str, Any] = load_json(dump_json(found))
    return plain


def digest(parts: Mapping[str, Any]) -> str:
    """The digest of such parts."""
    return sha256(dump_json(dict(sorted(parts.items()))).encode())


def require_same(kind: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> None:
    """Raises InvalidInput, naming the first thing that differs with both values, unless the two are the same.

    kind: `plan` or `machine`. where: the study and its storage, in words.
    """
    for key in dict.fromkeys([*theirs, *ours]):
        if theirs.get(key) != ours.get(key):
            if kind == "plan":
                remedy = "take the same study file, or another name for the study"
            elif key == "ppas":
                remedy = "install the same release everywhere, or begin a study of another name"
            else:
                remedy = "measure on like machines only, or begin a study of its own here"
            raise InvalidInput(
                f"{where} was begun with another {kind}: {key} is {_short(theirs.get(key))} there, "
                f"{_short(ours.get(key))} here; {remedy}"
            )


def apart(theirs: Outcome, ours: Outcome, objectives: Sequence[str]) -> float:
    """How much worse the reference measures here than there, as the ratio of a trial to its reference: above 1 is worse."""
    return aggregate.geometric_mean(aggregate.objective(name, ours.regimes, theirs.regimes) for name in objectives)


def require_alike(ratio: float, where: str) -> None:
    """Raises InvalidInput when machines whose references are `ratio` apart (see `apart`) can not be called alike."""
    if not 1 / MOST_APART <= ratio <= MOST_APART:
        raise InvalidInput(
            f"{where}: the reference measures {ratio:.2g} times here what it measured on the machine that began, though both "
            f"say the same of themselves; allowed: {1 / MOST_APART:g} to {MOST_APART:g} times. Look for another user of the "
            "GPU, or for a limit on its power, here and there"
        )


def _short(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… (digest {sha256(text.encode())[:19]})"
