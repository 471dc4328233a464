"""A storage of Optuna that waits for a database which is away, and says so, instead of ending the study."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, GrpcStorageProxy, RDBStorage, get_storage
from sqlalchemy import exc

from autotune import interrupt
from autotune.distributed.url import StorageUrl
from ppas_core.errors import InvalidInput, NoResult

T = TypeVar("T")

OUTAGE_S: Final = 900.0
"""How long a storage may be away before a worker gives up."""
_LONGEST_WAIT_S: Final = 10.0
_TRIES_AT_THE_END: Final = 2
_SAY_EVERY_S: Final = 30.0
_CONNECT_S: Final = 10
_SILENT_S: Final = 60
"""How long a connection may be silent while an answer is awaited: then the network lost it without a word."""
_CONNECT: Final[dict[str, dict[str, int]]] = {
    "postgresql": {
        "connect_timeout": _CONNECT_S, "tcp_user_timeout": 1000 * _SILENT_S,
        "keepalives_idle": _SILENT_S // 2, "keepalives_interval": 10, "keepalives_count": 3,
    },
    "mysql": {"connect_timeout": _CONNECT_S, "read_timeout": _SILENT_S, "write_timeout": _SILENT_S},
}  # fmt: skip
"""What the drivers are told beside the URL."""
_DRIVERS: Final = {"postgresql": "psycopg[binary]", "mysql": "pymysql[rsa]", "grpc": "grpcio and protobuf"}
_OF_THE_USER: Final = (
    "authentication failed", "no password supplied", "does not exist", "access denied", "unknown database",
    "could not translate host name", "failed to resolve host", "unable to open database file", "permission denied",
)  # fmt: skip
"""Words of a database that will say the same however long one waits."""
_IN_THE_WAY: Final = ("deadlock", "lock wait timeout", "could not serialize")
"""Words of a database that is there, and had two workers write at once: the next try is one of them alone."""

_LOST: Final = (
    exc.OperationalError, exc.InterfaceError, exc.TimeoutError,
    exc.PendingRollbackError, exc.ResourceClosedError,  # what came of a connection that broke just before
)  # fmt: skip


@dataclass(slots=True)
class Patience:
    """Tries again what failed because the storage was away: after 0.2 s, 0.4 s … 10 s, for `outage_s` in all.

    Once the process was asked to end it gives up within a second: a trial that cannot be given back goes stale, and is found.

    say: told when the storage goes away, every 30 s while it is, and when it is back; once for all threads.
    """

    where: StorageUrl
    say: Callable[[str], None]
    outage_s: float = OUTAGE_S
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = interrupt.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since_s: float | None = None
    _said_s: float = 0.0
    _gave_up: bool = False

    def through(self, call: Callable[[], T], *, opening: bool = False) -> T:
        """What `call` returns. Raises NoResult when the storage stays away, InvalidInput when it refuses for good."""
        tries, began = 0, self.clock()
        while True:
            try:
                with interrupt.held():  # a transaction is not torn apart
                    found = call()
            except Exception as error:
                reason = _away(error)
                if reason is None:
                    raise
                if opening and any(words in reason.lower() for words in _OF_THE_USER):
                    raise InvalidInput(f"storage {self.where}: {reason}; check its URL and its users") from None
                if interrupt.is_asked() and tries >= _TRIES_AT_THE_END:
                    raise NoResult(
                        f"storage {self.where}: is away ({reason}), and this process was asked to end"
                    ) from None
                if not any(words in reason.lower() for words in _IN_THE_WAY):
                    self._note_away(reason)
                if self._gave_up or self.clock() - began >= self.outage_s:
                    self._gave_up = True
                    raise NoResult(
                        f"storage {self.where}: away for {self.outage_s:.0f} s ({reason}); what was measured is kept: "
                        "give the same command again when it is back"
                    ) from None
                tries += 1
                # Spread, so that many workers do not come back in the same moment.
                self.wait(min(_LONGEST_WAIT_S, 0.1 * 2**tries) * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            else:
                self._note_back()
                return found

    def _note_away(self, reason: str) -> None:
        now = self.clock()
        with self._lock:
            if self._since_s is None:
                self._since_s = self._said_s = now
                self.say(f"storage {self.where} is away ({reason}); waiting up to {self.outage_s:.0f} s")
            elif now - self._said_s >= _SAY_EVERY_S:
                self._said_s = now
                self.say(f"storage {self.where} is still away after {now - self._since_s:.0f} s ({reason})")

    def _note_back(self) -> None:
        with self._lock:
            if self._since_s is not None:
                self.say(f"storage {self.where} is back after {self.clock() - self._since_s:.0f} s")
                self._since_s = None


def open_storage(where: StorageUrl, patience: Patience) -> BaseStorage:
    """The storage at `where`. Raises InvalidInput when its driver is missing or it refuses, NoResult when it stays away."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # outages are told here, in a line each
    try:
        inner = patience.through(lambda: _proxy(where) if where.kind == "grpc" else _database(where), opening=True)
    except ImportError:
        raise InvalidInput(
            f"storage {where} needs the package {_DRIVERS[where.kind]}; install ppas-autotune[distributed]"
        ) from None
    except exc.SQLAlchemyError as error:
        raise InvalidInput(f"storage {where}: {_first_line(error)}; check its URL") from None
    except RuntimeError as error:
        if (reason := _of_the_versions(str(error))) is None:
            raise
        raise InvalidInput(f"storage {where}: {reason}") from None
    return _patient(inner, patience)


def _of_the_versions(text: str) -> str | None:
    """An error of Optuna or of a driver about versions, in our words and with the remedy; None for another one."""
    if "table schema" in text:
        if "storage upgrade" in text:
            return (
                "its tables are those of an older Optuna; with no worker running give `optuna storage upgrade --storage URL`, "
                "where the URL names the driver (postgresql+psycopg://…, mysql+pymysql://…), or name an empty database"
            )
        return "its tables are those of a newer Optuna; install that version here too, or name an empty database"
    if "cryptography" in text:
        return "its way of checking passwords needs the package cryptography; install ppas-autotune[distributed]"
    return None


def _proxy(where: StorageUrl) -> BaseStorage:
    host, port = where.address()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return GrpcStorageProxy(host=host, port=port)


def _database(where: StorageUrl) -> BaseStorage:
    if where.kind == "sqlite":
        return _made(lambda: _sqlite(where))
    # Asked before use: a connection from before an outage is replaced without a failure.
    return _made(
        lambda: RDBStorage(where.full, engine_kwargs={"pool_pre_ping": True, "connect_args": _CONNECT[where.kind]})
    )


def _made(make: Callable[[], RDBStorage]) -> BaseStorage:
    """What `make` gives; several workers that make the tables at once get in each other's way, and all but one again."""
    for _ in range(5):
        try:
            return get_storage(make())
        except (exc.IntegrityError, exc.ProgrammingError, exc.OperationalError) as error:
            if isinstance(error, exc.OperationalError) and "already exists" not in str(error):
                raise
            time.sleep(random.uniform(0.1, 0.5))  # noqa: S311 - no secret
    return get_storage(make())


def _sqlite(where: StorageUrl) -> RDBStorage:
    """A transaction takes SQLite's one write lock when it begins: else two workers could claim the same trial."""
    file = where.full.removeprefix("sqlite:///")

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(file, timeout=60, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    storage = RDBStorage(where.full, engine_kwargs={"creator": connect})

    @sqlalchemy.event.listens_for(storage.engine, "begin")
    def _begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return storage


def _patient(inner: BaseStorage, patience: Patience) -> BaseStorage:
    """`inner`, with every call going through `patience`."""

    def method(name: str) -> Callable[..., Any]:
        called = getattr(inner, name)

        def through(_self: BaseStorage, *args: Any, **options: Any) -> Any:
            return patience.through(lambda: called(*args, **options))

        return through

    names = [name for name, value in vars(BaseStorage).items() if callable(value) and not name.startswith("__")]
    made = type("PatientStorage", (BaseStorage,), {name: method(name) for name in names})
    return cast("BaseStorage", made())


def _away(error: BaseException) -> str | None:
    """Why the storage could not be reached, in a line; None for an error that waiting does not cure."""
    for cause in _causes(error):
        if isinstance(cause, _LOST) or (isinstance(cause, exc.DBAPIError) and cause.connection_invalidated):
            return _first_line(cause)
        if (code := _grpc_code(cause)) is not None:
            return f"gRPC: {code}" if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL") else None
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ if isinstance(error, StorageInternalError) else None


def _grpc_code(error: BaseException) -> str | None:
    """The status of a failed call through the proxy; gRPC is not imported for those who do not use it."""
    if not any(kind.__name__ == "RpcError" for kind in type(error).__mro__):
        return None
    return str(cast("Any", error).code().name)


def _first_line(error: BaseException) -> str:
    text = str(getattr(error, "orig", None) or error) or type(error).__name__
    return text.strip().splitlines()[0]
