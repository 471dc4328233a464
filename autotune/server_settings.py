"""How a running server's settings are changed and read back: through the file that it watches, or through its route.

Both speak of versions, acknowledgements and a state, as `ppas_core.vllm.live` defines them. The route's token is sent
to the server's own address alone: no proxy, no redirect.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final, Protocol

from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from ppas_core.vllm import live

TOKEN_VARIABLE: Final = "PPAS_HTTP_TOKEN"  # noqa: S105 - the variable's name, which the route's server reads as well
_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02


class Channel(Protocol):
    """A way to a server's settings."""

    @property
    def name(self) -> str:
        """What people know it by."""
        ...

    def ask(self, params: PolicyParams | None) -> int:
        """Asks for `params`, None for off, and gives the version of the request; the engine's next step applies it."""
        ...

    def state(self) -> dict[str, Any] | None:
        """The engine's state, None where it has not reported any yet."""
        ...


class FileChannel:
    """The settings file that the server watches, its PPAS_SETTINGS_FILE."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The file."""
        return str(self._path)

    def ask(self, params: PolicyParams | None) -> int:
        """Writes the file."""
        return live.write_settings(self._path, params)

    def state(self) -> dict[str, Any] | None:
        """Reads the file beside it."""
        return live.read_state(self._path)


class RouteChannel:
    """`/ppas/settings` and `/ppas/status` of the server at `url`; token: the bearer token, None for none.

    Raises InvalidInput where the server has no such route or wants another token, NoResult where it fails.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._token = token

    @property
    def name(self) -> str:
        """The route, without the token."""
        return f"{self._url}/ppas/settings"

    def ask(self, params: PolicyParams | None) -> int:
        """Sends the settings; what the server refuses raises NoResult with its reason."""
        reply = self._call("PUT", "/ppas/settings", {"ppas": None if params is None else params.to_dict()})
        return int((reply or {})["version"])

    def state(self) -> dict[str, Any] | None:
        """Asks for the state."""
        return self._call("GET", "/ppas/status", None)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - base_url checked the scheme
            self._url + path, data=data, method=method, headers=headers
        )
        try:
            with _DIRECT.open(request, timeout=_TIMEOUT_S) as reply:
                found = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            self._check_refusal(error)
            return None  # the engine has not reported yet
        except (OSError, ValueError) as error:
            raise NoResult(f"{self._url}{path} does not answer: {error}") from None
        if not isinstance(found, dict):
            raise NoResult(f"{self._url}{path} answers with something else than P-PAS would")
        return found

    def _check_refusal(self, error: urllib.error.HTTPError) -> None:
        """Raises, unless the engine has only not reported yet."""
        said = _detail(error)
        match error.code:
            case 503:
                return
            case 401:
                raise InvalidInput(
                    f"{self.name} wants another token; give the server's own in {TOKEN_VARIABLE} or as server.token_file"
                )
            case 403:
                raise InvalidInput(
                    f"{self.name}: {said}; start that server with {TOKEN_VARIABLE}, and give the same token here"
                )
            case 404:
                raise InvalidInput(
                    f"{self.name} is not there; start that server with VLLM_PLUGINS=ppas and PPAS_SETTINGS_FILE (vLLM "
                    "0.27.1 or newer), or name the file that it watches as server.settings_file"
                )
            case 422:
                raise NoResult(f"the server refused the settings: {said}")
        raise NoResult(f"{self.name} answers {error.code}: {said}")


def read_token(file: Path | None) -> str | None:
    """The route's token: what `file` holds, else the variable PPAS_HTTP_TOKEN, else None. Raises InvalidInput."""
    if file is None:
        token, origin = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    else:
        origin = str(file)
        try:
            token = file.read_text(encoding="ascii").strip()
        except OSError as error:
            raise InvalidInput(f"{file}: the token cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            token = "\0"  # noqa: S105 - refused below, like any other that no header can carry
        if not token:
            raise InvalidInput(f"{file}: holds no token")
    if not (token.isascii() and all("!" <= character <= "~" for character in token)):
        raise InvalidInput(f"{origin}: a token is one word of printable ASCII characters")
    return token or None


def wait_for_ack(channel: Channel, version: int, *, timeout_s: float) -> dict[str, Any]:
    """The acknowledgement of `version`, applied or refused. Raises NoResult after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        state = channel.state()
        for ack in reversed(state["acks"] if state is not None else []):
            if ack["version"] == version:
                return dict(ack)
        if time.monotonic() >= deadline:
            raise NoResult(
                f"the engine did not acknowledge settings version {version} within {timeout_s:g} s; check that the "
                f"server watches what is changed: {channel.name}"
            )
        time.sleep(_POLL_S)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: the token goes nowhere else."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        """Follows none."""
        return


_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        body = json.loads(error.read())
    except (OSError, ValueError):
        return str(error.reason)
    body = body if isinstance(body, dict) else {}
    wrapped = body.get("error")  # vLLM's application wraps what a route says
    said = body.get("detail") or (wrapped.get("message") if isinstance(wrapped, dict) else None) or error.reason
    return " ".join(str(said).split())[:500]
