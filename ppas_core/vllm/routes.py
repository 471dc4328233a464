"""The entry point of `vllm.endpoint_plugins`: `GET` and `PUT /ppas/settings`, `GET /ppas/status`.

Off unless the plugin is named in VLLM_PLUGINS, which is vLLM's rule, and a settings file is given. Without
PPAS_HTTP_TOKEN only programs on this machine are served: a loopback client, no proxy in between, no browser page.
With it, whoever sends it as a bearer token. The token is compared in constant time and never logged.
"""

# No postponed annotations here: FastAPI reads those of nested functions at run time.
import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Request

from ppas_core.errors import NoResult, PpasError
from ppas_core.policy import PolicyParams
from ppas_core.vllm.live import read_settings, read_state, wait_for_ack, write_settings
from ppas_core.vllm.metrics import register_metrics
from ppas_core.vllm.settings import RUNTIME_KEY, SETTINGS_FILE_VARIABLE, EngineLimits, params_from_json

TOKEN_VARIABLE: Final = "PPAS_HTTP_TOKEN"  # noqa: S105 - the variable's name
MAX_WAIT_S: Final = 60.0
_PROXY_HEADERS: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class EndpointPlugin:
    """vLLM's contract for endpoint plugins. The routes answer 404 while no settings file is known."""

    name = "ppas"
    required_tasks = None

    def __init__(self) -> None:
        path = os.environ.get(SETTINGS_FILE_VARIABLE)
        self._settings_file = Path(path) if path else None
        self._token = os.environ.get(TOKEN_VARIABLE) or None

    def attach_router(self, app: FastAPI) -> None:
        """Register the routes."""
        app.include_router(build_router(lambda: self._settings_file, self._token))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the settings file from `--additional-config` where the environment names none."""
        config = getattr(args, "additional_config", None)
        if self._settings_file is None and isinstance(config, Mapping):
            path = (config.get(RUNTIME_KEY) or {}).get("settings_file")
            self._settings_file = Path(path) if path else None
        if self._settings_file is not None:
            register_metrics(self._settings_file)


def build_router(settings_file: Any, token: str | None) -> APIRouter:
    """The routes. settings_file: called at each request, gives the path or None. token: the bearer token, None for
    none.
    """

    def admit(request: Request) -> None:
        if not is_admitted(request.client.host if request.client else None, request.headers, token):
            if token:
                raise HTTPException(401, "send the bearer token")
            raise HTTPException(403, f"served to this machine alone; set {TOKEN_VARIABLE} to serve others")

    def known_file() -> Path:
        path: Path | None = settings_file()
        if path is None:
            raise HTTPException(404, f"no settings file: start the server with {SETTINGS_FILE_VARIABLE}")
        return path

    router = APIRouter(prefix="/ppas", dependencies=[Depends(admit)])
    known = Depends(known_file)

    def get_settings(path: Annotated[Path, known]) -> dict[str, Any]:
        state = read_state(path)
        try:
            asked = read_settings(path)
        except PpasError as error:
            return {"asked": None, "error": str(error), "in_force": state and state["in_force"]}
        return {
            "asked": None if asked is None else {"version": asked[0], "ppas": asked[1]},
            "in_force": state and state["in_force"],
        }

    def put_settings(
        path: Annotated[Path, known],
        body: Annotated[dict[str, Any], Body()],
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
    ) -> dict[str, Any]:
        if set(body) != {"ppas"}:
            raise HTTPException(422, 'send {"ppas": {...}} with the settings, or {"ppas": null} for off')
        try:
            version = write_settings(path, parse_for(path, body["ppas"]))
        except PpasError as error:
            raise HTTPException(422, str(error)) from None
        except OSError as error:
            raise HTTPException(507, f"the settings file cannot be written: {error.strerror}") from None
        if wait_s:
            try:
                return wait_for_ack(path, version, timeout_s=wait_s)
            except NoResult:
                pass
        return {"version": version, "status": "pending"}

    def get_status(path: Annotated[Path, known]) -> dict[str, Any]:
        state = read_state(path)
        if state is None:
            raise HTTPException(503, "the engine has not reported yet")
        return state

    router.get("/settings")(get_settings)
    router.put("/settings")(put_settings)
    router.get("/status")(get_status)
    return router


def parse_for(settings_file: Path, data: object) -> PolicyParams | None:
    """Settings from a request's body, held against the engine's limits where it has reported them. Raises PpasError."""
    if data is None:
        return None
    state = read_state(settings_file)
    if state is None:
        raise NoResult("the engine has not reported its limits yet; try again in a second")
    engine = state["engine"]
    return params_from_json(data, EngineLimits(engine["startup_budget_tokens"], engine["max_num_seqs"]))


def is_admitted(client_host: str | None, headers: Mapping[str, str], token: str | None) -> bool:
    """Whether a request may read and change settings."""
    if token is not None:
        sent = headers.get("authorization", "")
        return hmac.compare_digest(sent.encode(), f"Bearer {token}".encode())
    if any(name in headers for name in _PROXY_HEADERS) or "origin" in headers:
        return False
    return _is_loopback(client_host) and _is_loopback(_host_of(headers.get("host", "")))


def _host_of(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


endpoint_plugin = EndpointPlugin
"""What the entry point names: called without arguments, it gives the plugin."""
