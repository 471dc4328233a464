"""The entry point of `vllm.endpoint_plugins`: `GET` and `PUT /ppas/settings`, `GET /ppas/status`.

Off unless the plugin is named in VLLM_PLUGINS, which is vLLM's rule, and a settings file is given. Without
PPAS_HTTP_TOKEN only programs on this machine are served: a loopback client, no proxy in between, no browser page.
With it, whoever sends it as a bearer token. The token is compared in constant time and never logged. Nothing of a body
is read before the sender was admitted, and never more of it than a settings file may hold.
"""

# No postponed annotations here: FastAPI reads those of nested functions at run time.
import hmac
import ipaddress
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.security import HTTPBearer
from starlette.requests import ClientDisconnect

from ppas_core.errors import NoResult, PpasError
from ppas_core.plain_json import load_json
from ppas_core.policy import MAX_VALUE, PolicyParams, Scope
from ppas_core.vllm.control import MAX_SETTINGS_BYTES
from ppas_core.vllm.live import read_settings, read_state, wait_for_ack, write_settings
from ppas_core.vllm.metrics import register_metrics
from ppas_core.vllm.settings import RUNTIME_KEY, SETTINGS_FILE_VARIABLE, EngineLimits, params_from_json

TOKEN_VARIABLE: Final = "PPAS_HTTP_TOKEN"  # noqa: S105 - the variable's name
MAX_WAIT_S: Final = 60.0
_WHOLE: Final = {"type": "integer", "minimum": 1, "maximum": MAX_VALUE}
_SETTINGS_SCHEMA: Final = {
    "type": "object",
    "required": ["b_max", "b_cap"],
    "additionalProperties": False,
    "properties": {
        **dict.fromkeys(("b_max", "b_cap", "n_th", "max_num_seqs"), _WHOLE),
        "t_large": {"anyOf": [_WHOLE, {"type": "null"}]},
        "scope": {"enum": [str(scope) for scope in Scope]},
        "decode_guard": {"type": "boolean"},
    },
}
"""What a body may hold, for the OpenAPI description; `PolicyParams` and the engine's limits refuse more."""
_BODY: Final = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["ppas"],
                "additionalProperties": False,
                "properties": {"ppas": {"anyOf": [_SETTINGS_SCHEMA, {"type": "null"}]}},
            }
        }
    },
}
_PROXY_HEADERS: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class EndpointPlugin:
    """vLLM's contract for endpoint plugins. The routes answer 404 while no settings file is known."""

    name = "ppas"
    required_tasks = None

    def __init__(self) -> None:
        path = os.environ.get(SETTINGS_FILE_VARIABLE)
        self._settings_file = Path(path) if path else None
        # Stripped as its senders strip it: a secret mounted from a file ends its line, and no header can say that.
        self._token = os.environ.get(TOKEN_VARIABLE, "").strip() or None

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

    # The second is for the OpenAPI description alone; `admit` decides.
    guards = [Depends(admit), *([Depends(HTTPBearer(auto_error=False))] if token else [])]
    refusals: dict[int | str, dict[str, Any]] = {
        401 if token else 403: {"description": "Not admitted"},
        404: {"description": "The server has no settings file"},
    }
    router = APIRouter(prefix="/ppas", dependencies=guards, responses=refusals)
    known = Depends(known_file)

    writing = threading.Lock()  # two writers at once would use one version for two settings

    def reported(path: Path) -> dict[str, Any] | None:
        try:
            return read_state(path)
        except (PpasError, OSError) as error:
            raise HTTPException(503, f"the engine's state cannot be read: {error}") from None

    def get_settings(path: Annotated[Path, known]) -> dict[str, Any]:
        state = reported(path)
        try:
            asked = read_settings(path)
        except (PpasError, OSError) as error:
            return {"asked": None, "error": str(error), "in_force": state and state["in_force"]}
        return {
            "asked": None if asked is None else {"version": asked[0], "ppas": asked[1]},
            "in_force": state and state["in_force"],
        }

    def put_settings(
        path: Annotated[Path, known],
        body: Annotated[object, Depends(read_body)],
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
    ) -> dict[str, Any]:
        if not isinstance(body, dict) or set(body) != {"ppas"}:
            raise HTTPException(422, 'send {"ppas": {...}} with the settings, or {"ppas": null} for off')
        try:
            with writing:
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
        state = reported(path)
        if state is None:
            raise HTTPException(503, "the engine has not reported yet")
        return state

    unread = {503: {"description": "The engine has not reported yet, or its state cannot be read"}}
    router.get("/settings", responses=unread)(get_settings)
    router.put(
        "/settings",
        openapi_extra={"requestBody": _BODY},
        responses={
            400: {"description": "wait_s is out of range, where vLLM answers; other applications say 422"},
            413: {"description": f"The body is larger than {MAX_SETTINGS_BYTES} bytes"},
            415: {"description": "The body is not sent as application/json"},
            422: {"description": "Not settings that this engine can take; the reason is given"},
            507: {"description": "The settings file cannot be written"},
        },
    )(put_settings)
    router.get("/status", responses=unread)(get_status)
    return router


async def read_body(request: Request) -> object:
    """The request's body as parsed JSON; larger than any settings file, it is refused without being read to its end."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "send the settings as application/json")
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > MAX_SETTINGS_BYTES:
                raise HTTPException(413, f"settings take a few hundred bytes; allowed: {MAX_SETTINGS_BYTES}")
        return load_json(bytes(data))
    except ValueError:
        raise HTTPException(422, "the body is not JSON") from None
    except ClientDisconnect:
        raise HTTPException(400, "the request ended within its body") from None


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
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped  # as a server that listens on :: sees 127.0.0.1
    return address.is_loopback


endpoint_plugin = EndpointPlugin
"""What the entry point names: called without arguments, it gives the plugin."""
