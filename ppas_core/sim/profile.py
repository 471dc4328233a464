"""What is simulated: a measured server (model, GPU, vLLM version) as step costs, KV pool and provenance, from JSON."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ppas_core.errors import InvalidInput
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json, require_notes, require_text
from ppas_core.sim.cost import StepCost
from ppas_core.versions import require_version

DEFAULT_PROFILE: Final = "rtx5090-qwen2.5-3b"
"""The profile that a study uses when it names none."""

FORMAT: Final = "ppas-profile"
VERSION: Final = 1
_LONGEST_DELAY_S: Final = 3600


@dataclass(frozen=True, slots=True)
class Profile:
    """A server to simulate; validated at construction.

    name, model, gpu, vllm_version: what was measured.
    cost: its step-time model, see `StepCost`.
    frontend_delay_s: from a request's sending until the scheduler can see it (HTTP, tokenizer, hand-over).
    num_kv_blocks, block_size: its KV pool as vLLM reports it; one block of it is never handed out.
    max_model_len: most tokens of a request, prompt and output together.
    pipeline_depth: 2 for async scheduling (a step is planned while the step before runs), 1 without.
    prefix_caching: whether the server keeps the KV blocks of earlier requests for prompts that begin alike.
    provenance: who measured, on what, and how the numbers were fitted. fit: residuals and what is not identified.
    """

    name: str
    model: str
    gpu: str
    vllm_version: str
    cost: StepCost
    frontend_delay_s: float
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    pipeline_depth: int
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fit: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        for name in ("name", "model", "gpu", "vllm_version"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidInput(f"profile {name} is {value!r}; allowed: a text that is not empty")
            require_text(value, f"profile {name}")
        if not isinstance(self.cost, StepCost):
            raise InvalidInput(f"profile {self.name}: cost is {self.cost!r}; allowed: a StepCost")
        delay = self.frontend_delay_s
        if not _is_number(delay) or not 0 <= delay <= _LONGEST_DELAY_S:
            raise InvalidInput(
                f"profile {self.name}: frontend_delay_s is {delay!r}; allowed: 0 to {_LONGEST_DELAY_S} seconds"
            )
        object.__setattr__(self, "frontend_delay_s", float(delay))
        for name, least, most in (
            ("num_kv_blocks", 2, 2**40),
            ("block_size", 1, 2**20),
            ("max_model_len", 2, 2**31),
            ("pipeline_depth", 1, 2),
        ):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
                raise InvalidInput(f"profile {self.name}: {name} is {count!r}; allowed: {least} to {most}")
        if not isinstance(self.prefix_caching, bool):
            raise InvalidInput(
                f"profile {self.name}: prefix_caching is {self.prefix_caching!r}; allowed: true or false"
            )
        for name in ("provenance", "fit"):
            notes = getattr(self, name)
            if not isinstance(notes, Mapping):
                raise InvalidInput(f"profile {self.name}: {name} is {notes!r}; allowed: an object with named entries")
            require_notes(notes, f"profile {self.name}: {name}")
            object.__setattr__(self, name, MappingProxyType(dict(notes)))
        self._check_fit()

    def _check_fit(self) -> None:
        """The two entries of `fit` that the tuner itself reads; everything else there is for people."""
        where = f"profile {self.name}: fit.measured_range"
        ranges = self.fit.get("measured_range", {})
        if not isinstance(ranges, Mapping):
            raise InvalidInput(f"{where} is {ranges!r}; allowed: an object such as {{'budget_tokens': [512, 16384]}}")
        for name, bounds in ranges.items():
            pair = isinstance(bounds, list | tuple) and len(bounds) == 2 and all(map(_is_number, bounds))
            if not pair or bounds[0] > bounds[1]:
                raise InvalidInput(f"{where}.{name} is {bounds!r}; allowed: [lowest, highest], two ascending numbers")
        reason = self.fit.get("not_measured", "none")
        if not isinstance(reason, str) or not reason:
            raise InvalidInput(f"profile {self.name}: fit.not_measured is {reason!r}; allowed: the reason, as a text")
        where, value = f"profile {self.name}: fit", self.fit
        for name in ("held_out_ppas_error_per_regime", "mean_absolute"):
            value, where = value.get(name, {}), f"{where}.{name}"
            if not isinstance(value, Mapping):
                raise InvalidInput(f"{where} is {value!r}; allowed: an object")
        if not _is_number(error := value.get("avg_latency", 0.0)) or error < 0:
            raise InvalidInput(f"{where}.avg_latency is {error!r}; allowed: a share of at least 0, such as 0.02")

    @property
    def longest_servable_tokens(self) -> int:
        """Most tokens, prompt and output together, of a request that can be served alone.

        The last output token is never computed on, so its KV entry is not needed.
        """
        return min(self.max_model_len, (self.num_kv_blocks - 1) * self.block_size + 1)

    @property
    def doubt(self) -> str | None:
        """Why no result of this profile can be trusted without a measurement, a sentence; None where it was measured."""
        reason = self.fit.get("not_measured")
        return None if reason is None else f"profile {self.name} was not measured: {reason}"

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the profile's canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain JSON values with format and version; `from_dict` gives it back."""
        body = {name: getattr(self, name) for name in _FIELD_NAMES}
        body.update(cost=self.cost.to_dict(), provenance=dict(self.provenance), fit=dict(self.fit))
        if not self.prefix_caching:  # said only where it is so: profiles written before keep their digest
            del body["prefix_caching"]
        return {"format": FORMAT, "version": VERSION, **body}

    def save(self, path: Path) -> None:
        """Writes the profile to `path`, whole or not at all; `load_profile` reads it."""
        write_atomically(path, (dump_json(self.to_dict(), indent=1) + "\n").encode())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """A profile from parsed JSON. Raises InvalidInput on another format, unknown or missing keys, bad values."""
        if data.get("format") != FORMAT:
            raise InvalidInput(f"format is {data.get('format')!r}; a profile says {FORMAT!r}")
        require_version(
            "profile", data.get("version"), VERSION, again="make it again with `ppas calibrate` or `ppas fit`"
        )
        body = {key: value for key, value in data.items() if key not in ("format", "version")}
        if unknown := sorted(set(body) - set(_FIELD_NAMES)):
            raise InvalidInput(f"unknown profile entry {unknown[0]!r}; allowed: {', '.join(_FIELD_NAMES)}")
        optional = ("provenance", "fit", "prefix_caching")
        if missing := [name for name in _FIELD_NAMES if name not in body and name not in optional]:
            raise InvalidInput(f"profile entry {missing[0]!r} is missing; required: {', '.join(_FIELD_NAMES)}")
        if not isinstance(body["cost"], Mapping):
            raise InvalidInput(f"profile cost is {body['cost']!r}; allowed: an object of step costs")
        return cls(**{**body, "cost": StepCost.from_dict(dict(body["cost"]))})


_FIELD_NAMES: Final = tuple(entry.name for entry in fields(Profile))


def profile_names() -> tuple[str, ...]:
    """The names of the shipped profiles, in alphabetical order."""
    names = (entry.name for entry in _shipped().iterdir() if entry.name.endswith(".json"))
    return tuple(sorted(name.removesuffix(".json") for name in names))


def load_profile(name_or_path: str) -> Profile:
    """The shipped profile of that name, or the profile in that JSON file.

    Raises InvalidInput when it is neither, with the known names and the nearest, and when the file is not a profile.
    """
    if name_or_path in profile_names():
        return _parse((_shipped() / f"{name_or_path}.json").read_text(encoding="utf-8"), name_or_path)
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        known = profile_names()
        near = difflib.get_close_matches(name_or_path, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidInput(f"no profile or file {name_or_path!r}; shipped profiles: {', '.join(known)}{hint}") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that no file can have
        raise InvalidInput(f"profile file {name_or_path!r} cannot be read: {error}") from None
    return _parse(text, name_or_path)


def _shipped() -> Any:
    return resources.files("ppas_core.sim") / "profiles"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parse(text: str, source: str) -> Profile:
    try:
        data = load_json(text)
    except ValueError as error:
        raise InvalidInput(f"profile {source!r} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"profile {source!r} is a JSON {type(data).__name__}; allowed: an object")
    return Profile.from_dict(data)
