"""Which key signs or checks: Ed25519 from a PEM or OpenSSH file, and its fingerprint.

A private key is read only from a file that nobody else can read, and never leaves this module but as a signer.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppas_core.errors import InvalidInput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from securesystemslib.signer import CryptoSigner, SSlibKey

PASSPHRASE_VARIABLE: Final = "PPAS_KEY_PASSPHRASE"  # noqa: S105 - the variable's name
_MAX_BYTES: Final = 64 * 1024
_MAKE_ONE: Final = "make one with: ssh-keygen -t ed25519 -f FILE"
_OPENSSH: Final = b"-----BEGIN OPENSSH PRIVATE KEY-----"


def load_signer(path: Path) -> CryptoSigner:
    """The private key in `path`, to sign with; a passphrase comes from PPAS_KEY_PASSPHRASE.

    Raises InvalidInput when the file cannot be read, can be read by others, or holds no private Ed25519 key. What is
    in the file is in no message.
    """
    _require_library()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from securesystemslib.signer import CryptoSigner

    data = _read(path, private=True)
    if not _holds_private_key(data):
        raise InvalidInput(f"{path}: holds no private key in PEM or OpenSSH form; {_MAKE_ONE}")
    load: Callable[[bytes, bytes | None], object] = serialization.load_pem_private_key
    if data.lstrip().startswith(_OPENSSH):
        load = serialization.load_ssh_private_key
    try:
        try:
            key = load(data, None)
        except TypeError:  # it is encrypted
            passphrase = os.environ.get(PASSPHRASE_VARIABLE)
            if not passphrase:
                raise InvalidInput(f"{path}: is encrypted; give its passphrase in {PASSPHRASE_VARIABLE}") from None
            key = load(data, passphrase.encode(errors="surrogateescape"))
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidInput(
            f"{path}: cannot be read as a private key: damaged, another kind of key, or a wrong {PASSPHRASE_VARIABLE}"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(f"{path}: holds another kind of key ({_kind(key)}); allowed: Ed25519; {_MAKE_ONE}")
    return CryptoSigner(key, _named(key.public_key()))


def load_public_key(path: Path) -> SSlibKey:
    """The public key in `path`, named by its fingerprint. Raises InvalidInput."""
    _require_library()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    data = _read(path, private=False)
    if _holds_private_key(data):
        raise InvalidInput(f"{path}: is a private key; checking needs only the public one, and nobody else this file")
    pem = data.lstrip().startswith(b"-----BEGIN")
    keys = data.count(b"-----BEGIN") if pem else len([line for line in data.splitlines() if line.strip()])
    if keys > 1:
        raise InvalidInput(f"{path}: holds more than one key or line; name a file with the one public key to check by")
    load: Callable[[bytes], object] = serialization.load_pem_public_key if pem else serialization.load_ssh_public_key
    try:
        key = load(data.strip())
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidInput(f"{path}: cannot be read as a public key in PEM or OpenSSH form") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput(
            f"{path}: holds another kind of key ({_kind(key)}); allowed: Ed25519, as `ppas export --sign` signs with"
        )
    return _named(key)


def _named(key: Ed25519PublicKey) -> SSlibKey:
    """The key with its fingerprint as OpenSSH writes it (`ssh-keygen -lf`) as its name."""
    import base64

    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import ssh_key_fingerprint
    from securesystemslib.signer import SSlibKey

    fingerprint = base64.b64encode(ssh_key_fingerprint(key, SHA256())).decode().rstrip("=")
    return SSlibKey.from_crypto(key, keyid=f"SHA256:{fingerprint}")


def _read(path: Path, *, private: bool) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not make us wait
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"{path}: the key cannot be read: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"{path}: is no regular file; name the file of a key")
        if private and status.st_mode & 0o077:
            raise InvalidInput(
                f"{path}: others may read or change this private key (mode {stat.S_IMODE(status.st_mode):04o}); "
                f"chmod 600 {path}, and think about making a new one"
            )
        data = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MAX_BYTES:
        raise InvalidInput(f"{path}: is larger than {_MAX_BYTES} bytes; no key is")
    return data


def _holds_private_key(data: bytes) -> bool:
    first = data.lstrip().split(b"\n", 1)[0]
    return first.startswith(b"-----BEGIN") and b"PRIVATE KEY" in first


def _kind(key: object) -> str:
    return type(key).__name__.removeprefix("_").removesuffix("PrivateKey").removesuffix("PublicKey")


def _require_library() -> None:
    import importlib.util

    if any(importlib.util.find_spec(name) is None for name in ("securesystemslib", "cryptography")):
        raise InvalidInput("signatures need securesystemslib: pip install 'ppas-autotune[sign]'")
