"""Which published patched server can express a setting, and which variables and flags switch it on."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from ppas_core.errors import InvalidInput
from ppas_core.naming import did_you_mean
from ppas_core.policy import PolicyParams, Scope

Generation = Literal["0.22.1", "0.27.1"]
"""A published patched server, by the vLLM version it patches."""

GENERATIONS: Final[tuple[Generation, ...]] = ("0.22.1", "0.27.1")
PATCH_N_TH: Final = 2
"""n_th is fixed in both published patches."""
PATCH_0_22_1_B_CAP: Final = 2048
"""b_cap is fixed in the published patch of vLLM 0.22.1."""


def server_flags(params: PolicyParams) -> tuple[str, ...]:
    """The `vllm serve` flags that belong to `params`, whichever way the rest is switched on."""
    return ("--max-num-batched-tokens", str(params.b_max), "--max-num-seqs", str(params.max_num_seqs))


def environment(params: PolicyParams, generation: Generation | None = None) -> dict[str, str]:
    """The variables that switch `params` on, beside `server_flags`; none for a static budget.

    generation: the published patch to write for; None is our plugin, which knows every knob. PPAS_SCOPE is always
    written, so that our plugin reads an environment for a patch exactly as the patch does.
    Raises InvalidInput when that patch cannot express `params`.
    """
    if generation is not None and (reasons := nearest_expressible(params, generation)[1]):
        raise InvalidInput(f"the patched vLLM {generation} cannot express {params.label()}: {'; '.join(reasons)}")
    if params.is_static:
        return {}
    switch = "PPAS_ENABLED" if params.t_large is None else "PPAS_PLUS_ENABLED"
    variables = {switch: "1"}
    if generation != "0.22.1":
        variables["PPAS_B_CAP"] = str(params.b_cap)
    if params.t_large is not None:
        variables["PPAS_LARGE_PREFILL_THRESHOLD"] = str(params.t_large)
    if generation is None:
        variables["PPAS_N_TH"] = str(params.n_th)
    variables["PPAS_SCOPE"] = str(params.scope)
    if params.decode_guard and generation is None:
        variables["PPAS_DECODE_GUARD"] = "1"
    return variables


def nearest_expressible(params: PolicyParams, generation: Generation) -> tuple[PolicyParams, tuple[str, ...]]:
    """The setting nearest to `params` that the published patch can express, and why it is not `params` itself.

    No reason means that it acts as `params` does. b_max, max_num_seqs and, where the patch has them, b_cap and t_large
    are kept; what the patch fixes is replaced. Raises InvalidInput for another generation.
    """
    if generation not in GENERATIONS:
        raise InvalidInput(f"no published patch for vLLM {generation!r}{did_you_mean(generation, GENERATIONS)}")
    if params.is_static:
        return params, ()
    reasons = [f"n_th is {params.n_th}, the patch fixes {PATCH_N_TH}"] if params.n_th != PATCH_N_TH else []
    near = _nearest_0_22_1(params, reasons) if generation == "0.22.1" else _nearest_0_27_1(params, reasons)
    return near, tuple(reasons)


def _nearest_0_22_1(params: PolicyParams, reasons: list[str]) -> PolicyParams:
    if params.t_large is not None:
        reasons.append(f"t_large is {params.t_large}, the patch has no P-PAS+")
    if params.scope is not Scope.PREFILL:
        reasons.append(f"the scope is {params.scope}, the patch fixes prefill")
    if params.b_cap != PATCH_0_22_1_B_CAP:
        reasons.append(f"b_cap is {params.b_cap}, the patch fixes {PATCH_0_22_1_B_CAP}")
    if params.b_max <= PATCH_0_22_1_B_CAP:
        reasons.append(f"b_max is {params.b_max}, not above that b_cap: the patch would never act, so a static budget")
        return PolicyParams.static(params.b_max, max_num_seqs=params.max_num_seqs)
    # The guard acts under the global scope only: losing it is no reason of its own.
    return PolicyParams(params.b_max, PATCH_0_22_1_B_CAP, PATCH_N_TH, max_num_seqs=params.max_num_seqs)


def _nearest_0_27_1(params: PolicyParams, reasons: list[str]) -> PolicyParams:
    if params.scope is not Scope.GLOBAL:
        reasons.append(f"the scope is {params.scope}, the patch fixes global")
    elif params.decode_guard:
        reasons.append("decode_guard is on, the patch has none")
    b_cap = max(params.b_cap, params.max_num_seqs)
    if b_cap != params.b_cap:
        reasons.append(
            f"b_cap is {params.b_cap}, which under the global scope can starve decodes of {params.max_num_seqs} "
            f"sequences: raised to {b_cap}"
        )
    if b_cap == params.b_max:
        return PolicyParams.static(params.b_max, max_num_seqs=params.max_num_seqs)
    return replace(params, n_th=PATCH_N_TH, b_cap=b_cap, scope=Scope.GLOBAL, decode_guard=False)
