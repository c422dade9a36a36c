"""Who may say and hear what: keys, and the subjects that each one grants.

A hub without a keyring grants everything to everyone who reaches it, which on a socket of one's own
user is right. With one, whoever joins shows that it holds a key: the hub sends a number that it
never used before, and gets back its HMAC. What a key grants is granted by patterns of subjects.
"""

import hmac
import secrets
import string
from pathlib import Path
from typing import Final

import msgspec

from hear.config import parse_toml, where
from hear.errors import ConfigError, ProtocolError
from hear.own_files import read_own
from hear.subjects import Pattern

MIN_SECRET_BYTES: Final = 16
_MAX_REMEMBERED = 16_384


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates in PEM: whom to trust, and who one is. Relative paths start at the file."""

    authority: str
    certificate: str
    """Certificate and private key, one after the other in one file."""
    server_name: str | None = None
    """Name in the certificate of the hub, if it is not the one in its address."""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one who joins holds: ``hear ... --key FILE``."""

    name: str
    secret: str
    """At least 16 bytes, in hexadecimal."""
    tls: TlsFiles | None = None


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key at the hub, and the subjects that it may publish and hear, as patterns."""

    name: str
    secret: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Names that it may speak under; a last ``*`` stands for any ending. Empty: its own name."""


class KeyringFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the hub holds: one table ``[[key]]`` for each key."""

    key: tuple[Grant, ...]
    tls: TlsFiles | None = None


class Grants:
    """What one peer may do. Answers are remembered, since few stems make up all traffic."""

    def __init__(
        self,
        publish: tuple[str, ...],
        subscribe: tuple[str, ...],
        sources: tuple[str, ...] | None = None,
    ) -> None:
        self._publish = tuple(Pattern(text) for text in publish)
        self._subscribe = tuple(Pattern(text) for text in subscribe)
        self._sources = sources
        self._known: dict[tuple[bool, str], bool] = {}

    def may_publish(self, stem: str) -> bool:
        """Whether messages of a stem may be published."""
        return self._may(True, stem, self._publish)

    def may_hear(self, stem: str) -> bool:
        """Whether messages of a stem may be heard."""
        return self._may(False, stem, self._subscribe)

    def may_be(self, source: str) -> bool:
        """Whether messages may be said under this name."""
        return self._sources is None or any(
            source.startswith(name[:-1]) if name.endswith("*") else source == name
            for name in self._sources
        )

    @property
    def checks_sources(self) -> bool:
        """Whether the source of each message has to be looked at."""
        return self._sources is not None

    @property
    def may_hear_all(self) -> bool:
        """Whether everything may be heard."""
        return any(pattern.text == ">" for pattern in self._subscribe)

    def _may(self, publish: bool, stem: str, patterns: tuple[Pattern, ...]) -> bool:
        known = self._known.get((publish, stem))
        if known is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            # What is granted is granted for whole streams; one key of a stream grants none of it.
            known = any(pattern.covers(stem) and not pattern.names_key for pattern in patterns)
            self._known[publish, stem] = known
        return known


EVERYTHING: Final = Grants((">",), (">",))
"""What everyone may do at a hub without keys."""


class Keyring:
    """The keys of a hub."""

    def __init__(self, grants: tuple[Grant, ...]) -> None:
        self._secrets = {grant.name: bytes.fromhex(grant.secret) for grant in grants}
        self._grants = {
            grant.name: Grants(grant.publish, grant.subscribe, grant.sources or (grant.name,))
            for grant in grants
        }
        self._nobody = secrets.token_bytes(32)

    def check(self, key: str, nonce: bytes, session: str, name: str, proof: bytes) -> Grants | None:
        """What a peer may do that proves to hold a key; None if it does not prove it."""
        secret = self._secrets.get(key, self._nobody)  # an unknown key takes as long as a wrong one
        if not hmac.compare_digest(prove(secret, nonce, session, name), proof):
            return None
        return self._grants.get(key)


def new_nonce() -> bytes:
    """A number that was never used before."""
    return secrets.token_bytes(32)


def prove(secret: bytes, nonce: bytes, session: str, name: str) -> bytes:
    """What shows the hub that one holds a secret, and binds the name and session to it."""
    parts = (b"hear link 1", nonce, session.encode(), name.encode())
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, message, "sha256")


def load_key(path: Path) -> KeyFile:
    """Read the key of one who joins.

    Raises:
        ConfigError: the file cannot be read or used, or is not this user's alone.
    """
    key = parse_toml(path, read_own(path), KeyFile)
    _check_secret(path, "secret", key.secret)
    return msgspec.structs.replace(key, tls=_beside(path, key.tls))


def load_keyring(path: Path) -> KeyringFile:
    """Read the keys of a hub.

    Raises:
        ConfigError: the file cannot be read or used, or is not this user's alone.
    """
    keyring = parse_toml(path, read_own(path), KeyringFile)
    names = set()
    for number, grant in enumerate(keyring.key):
        at = f"key[{number}]"
        _check_secret(path, f"{at}.secret", grant.secret)
        if grant.name in names:
            raise ConfigError(f"{where(path, f'{at}.name')}: key {grant.name!r} is there twice")
        names.add(grant.name)
        for setting in ("publish", "subscribe"):
            for text in getattr(grant, setting):
                try:
                    Pattern(text)
                except ProtocolError as error:
                    raise ConfigError(f"{where(path, f'{at}.{setting}')}: {error}") from error
                if text.count(".") == 4 and not text.endswith((".*", ".>")):
                    raise ConfigError(
                        f"{where(path, f'{at}.{setting}')}: {text!r} names a key, and what is "
                        "granted is granted for whole streams: end it in '.*' or '.>'"
                    )
    return msgspec.structs.replace(keyring, tls=_beside(path, keyring.tls))


def _beside(path: Path, tls: TlsFiles | None) -> TlsFiles | None:
    """Certificates whose paths do not depend on where the process stands."""
    if tls is None:
        return None
    folder = path.absolute().parent
    return msgspec.structs.replace(
        tls, authority=str(folder / tls.authority), certificate=str(folder / tls.certificate)
    )


def _check_secret(path: Path, setting: str, secret: str) -> None:
    if len(secret) < 2 * MIN_SECRET_BYTES or len(secret) % 2 or set(secret) - set(string.hexdigits):
        raise ConfigError(
            f"{where(path, setting)}: a secret of {len(secret)} characters, expected at least "
            f"{2 * MIN_SECRET_BYTES} hexadecimal digits (as from: openssl rand -hex 32)"
        )
