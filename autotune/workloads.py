"""The workloads of a study file: what arrives at the server, and the traces that come of it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, field_validator

from autotune.fields import Float, Length, Model, Rate
from ppas_core.errors import InvalidInput
from traces.format import Trace
from traces.generate import heterogeneous, parse_phases, rag_bursts

_PAPER_RATES: Final = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)


class RagBursts(Model):
    """The paper's RAG bursts: idle and burst phases of Poisson arrivals, one prompt and output length."""

    family: Literal["rag-bursts"] = Field(description="The workload family.")
    rates_per_s: tuple[Rate, ...] = Field(
        default=_PAPER_RATES, min_length=1, description="Burst rates λ in requests per second; each is a load regime."
    )
    prompt_tokens: Length = Field(default=25_000, description="Prompt length of every request.")
    output_tokens: Length = Field(default=32, description="Output length of every request.")
    idle_rate_per_s: Rate = Field(default=0.2, description="Rate of the idle phases.")
    phase_s: Annotated[Float, Field(gt=0, le=86_400)] = Field(default=10.0, description="Seconds per phase.")

    def traces(self, seeds: tuple[int, ...]) -> list[Trace]:
        """One trace per rate and seed."""
        return [
            rag_bursts(
                rate,
                seed,
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                idle_rate_per_s=self.idle_rate_per_s,
                phase_s=self.phase_s,
            )
            for rate in self.rates_per_s
            for seed in seeds
        ]


class Heterogeneous(Model):
    """The published mixed shapes: equal shares of every (prompt, output) cell over phases of Poisson arrivals."""

    family: Literal["heterogeneous"] = Field(description="The workload family.")
    phases: tuple[str, ...] = Field(
        min_length=1, description="Phase schedules, SECONDS:RATE,… as in 20:0.05,10:0.4,20:0.05; each is a load regime."
    )
    prompt_tokens: tuple[Length, ...] = Field(min_length=1, description="Prompt lengths of the grid.")
    output_tokens: tuple[Length, ...] = Field(min_length=1, description="Output lengths of the grid.")

    @field_validator("phases")
    @classmethod
    def _phases_parse(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                parse_phases(text)
            except InvalidInput as error:
                raise ValueError(str(error)) from None
        return value

    def traces(self, seeds: tuple[int, ...]) -> list[Trace]:
        """One trace per phase schedule and seed."""
        return [
            heterogeneous(
                parse_phases(phases), seed, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens
            )
            for phases in self.phases
            for seed in seeds
        ]


class TraceFiles(Model):
    """Trace files of your own. Tuning and held-out files must differ."""

    family: Literal["files"] = Field(description="The workload family.")
    tuning: tuple[str, ...] = Field(min_length=1, description="Trace files to tune on, relative to the study file.")
    held_out: tuple[str, ...] = Field(
        min_length=1, description="Trace files to compare on, relative to the study file."
    )


WORKLOADS: Final[dict[str, type[BaseModel]]] = {
    "rag-bursts": RagBursts,
    "heterogeneous": Heterogeneous,
    "files": TraceFiles,
}
Workload = Annotated[RagBursts | Heterogeneous | TraceFiles, Field(discriminator="family")]
