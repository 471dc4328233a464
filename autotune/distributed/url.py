"""Which storage a URL names, and how it is written without its password."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from ppas_core.errors import InvalidInput

VARIABLE: Final = "PPAS_STORAGE"
"""Environment variable that names the storage, so that no password stands in a process list."""
_DRIVERS: Final = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mysql+pymysql": "mysql+pymysql",
    "grpc": "grpc",
}
_GRPC_PORT: Final = 13000
"""Where Optuna's proxy listens unless told otherwise."""
_PASSWORD: Final = re.compile(r"(?P<head>\w[\w+.-]*://[^\s/:@]*:)\S+(?=@)")
_ENCODED: Final = re.compile(r"[^:/@?#\s]*(?::[^/@?#\s]*)?@[^@]*(?:\?.*)?", re.DOTALL)
"""User, password and host as a URL has them: what would end a part of it is written as %40 and the like."""
_RAW: Final = re.compile(r"(?P<user>[^:/@]*):(?P<password>.+)@(?P<host>[^@]*)", re.DOTALL)
_IN_QUERY: Final = re.compile(r"(?P<head>[?&](?:\w*password|\w*secret|\w*token)=)[^&\s]+", re.IGNORECASE)


def redacted(text: str) -> str:
    """`text` with `***` for every password in a URL in it."""
    return _IN_QUERY.sub(r"\g<head>***", _PASSWORD.sub(r"\g<head>***", text))


@dataclass(frozen=True, slots=True)
class StorageUrl:
    """A storage that several processes share; its `str` and `repr` never show a password.

    full: what connects, with the driver that is meant. kind: sqlite, postgresql, mysql or grpc.
    """

    full: str
    kind: str

    @classmethod
    def parse(cls, text: str) -> StorageUrl:
        """`postgresql://`, `mysql://`, `sqlite:///FILE` or `grpc://HOST:PORT`. Raises InvalidInput.

        A password that was written as it is, with `@` or `/` in it, is encoded here.
        """
        scheme, separator, rest = text.partition("://")
        driver = _DRIVERS.get(scheme)
        if not separator or driver is None or not rest:
            raise InvalidInput(
                f"storage is {redacted(text)!r}; allowed: postgresql://USER@HOST/DATABASE, mysql://USER@HOST/DATABASE, "
                "grpc://HOST:PORT, and for one machine sqlite:///FILE"
            )
        found = cls(f"{driver}://{_encoded(rest)}", driver.partition("+")[0])
        if found.kind == "sqlite" and (not rest.startswith("/") or rest == "/"):
            raise InvalidInput(f"storage is {redacted(text)!r}; a file is named as sqlite:///FILE")
        if found.kind == "grpc":
            found.address()
        return found

    def address(self) -> tuple[str, int]:
        """Host and port of a gRPC proxy. Raises InvalidInput."""
        try:
            parts = urlsplit(self.full)
            host, port = parts.hostname, parts.port or _GRPC_PORT
        except ValueError as error:
            raise InvalidInput(f"storage is {self}: {error}; allowed: grpc://HOST:PORT") from None
        if host is None or parts.path not in ("", "/"):
            raise InvalidInput(f"storage is {self}; allowed: grpc://HOST:PORT")
        return host, port

    def __str__(self) -> str:
        return redacted(self.full)

    def __repr__(self) -> str:
        return f"StorageUrl({str(self)!r})"


def _encoded(rest: str) -> str:
    """What follows `://`, with a password in it that nobody encoded encoded: it would be cut off at its first `/` or `@`."""
    found = _RAW.fullmatch(rest)
    if found is None or _ENCODED.fullmatch(rest):
        return rest
    return f"{found['user']}:{quote(found['password'], safe='')}@{found['host']}"
