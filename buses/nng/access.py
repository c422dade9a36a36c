"""Who may say and hear what: keys, and the subjects that each one grants.

A hub without a keyring grants everything to everyone who reaches it, which on a socket of one's own
user is right. With one, hub and client show each other that they hold the same secret: each makes a
number that it never used before, and both answer with an HMAC over the two. From the secret and the
two numbers come the keys that seal what then travels. What a key grants is granted by patterns of
subjects.
"""

import hmac
import secrets
import string
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from hear.app.config import Line, parse_toml, where
from hear.app.own_files import read_own
from hear.buses.nng.frames import NONCE_BYTES
from hear.buses.nng.remembered import remember
from hear.errors import ConfigError, ProtocolError
from hear.subjects import Pattern

MIN_SECRET_BYTES: Final = 16
DEFAULT_PEERS: Final = 256
DEFAULT_MEMORY_MIB: Final = 96
_Name = Annotated[str, msgspec.Meta(min_length=1)]


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates in PEM: whom to trust, and who one is. Relative paths start at the file."""

    authority: Line
    certificate: Line
    """Certificate and private key, one after the other in one file."""
    server_name: Line | None = None
    """Name in the certificate of the hub, if it is not the one in its address."""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one who joins holds: ``hear ... --key FILE``."""

    name: _Name
    secret: str
    """At least 16 bytes, in hexadecimal."""
    tls: TlsFiles | None = None


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key at the hub, and the subjects that it may publish and hear, as patterns."""

    name: _Name
    secret: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Names that it may speak under; a last ``*`` stands for any ending. Empty: its own name."""
    peers: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = DEFAULT_PEERS
    """Most processes that may join with it at once."""
    memory_mib: Annotated[int, msgspec.Meta(ge=16, le=1 << 20)] = DEFAULT_MEMORY_MIB
    """Most memory that the hub keeps for all of them together."""


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
        *,
        max_peers: int = DEFAULT_PEERS,
        max_bytes: int = DEFAULT_MEMORY_MIB << 20,
    ) -> None:
        self.max_peers = max_peers
        self.max_bytes = max_bytes
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
            # What is granted is granted for whole streams; one key of a stream grants none of it.
            known = any(pattern.covers(stem) and not pattern.names_key for pattern in patterns)
            remember(self._known, (publish, stem), stem, known)
        return known


EVERYTHING: Final = Grants((">",), (">",), max_peers=1_024, max_bytes=1 << 30)
"""What everyone may do at a hub without keys."""


class Handshake(NamedTuple):
    """What both ends of a handshake know, and what each proves to know the secret over."""

    client_nonce: bytes
    hub_nonce: bytes
    key: str
    session: str
    name: str

    def prove_client(self, secret: bytes, stay: str, received: int) -> bytes:
        """What shows the hub that a hello with this ``hub`` and ``received`` is from the client."""
        return self._digest(secret, b"client", stay.encode(), b"%d" % received)

    def prove_hub(self, secret: bytes, stay: str, resumed: bool, received: int) -> bytes:
        """What shows the client that its welcome is from a hub that holds the key."""
        return self._digest(secret, b"hub", stay.encode(), b"%d %d" % (resumed, received))

    def seals(self, secret: bytes) -> tuple[bytes, bytes]:
        """The keys of what travels to the hub, and to the client, over this connection."""
        return self._digest(secret, b"to hub"), self._digest(secret, b"to client")

    def _digest(self, secret: bytes, what: bytes, *more: bytes) -> bytes:
        texts = (self.key.encode(), self.session.encode(), self.name.encode())
        parts = (b"hear link 2", what, self.client_nonce, self.hub_nonce, *texts, *more)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(secret, message, "sha256")


class Keyring:
    """The keys of a hub."""

    def __init__(self, grants: tuple[Grant, ...]) -> None:
        self._secrets = {grant.name: bytes.fromhex(grant.secret) for grant in grants}
        self._grants = {
            grant.name: Grants(
                grant.publish,
                grant.subscribe,
                grant.sources or (grant.name,),
                max_peers=grant.peers,
                max_bytes=grant.memory_mib << 20,
            )
            for grant in grants
        }
        self._nobody = secrets.token_bytes(32)

    def check(
        self, handshake: Handshake, proof: bytes, stay: str, received: int
    ) -> tuple[Grants, bytes] | None:
        """What a peer may do that proves to hold a key, and its secret; None without a proof."""
        # An unknown key takes as long as a wrong one.
        secret = self._secrets.get(handshake.key, self._nobody)
        if not hmac.compare_digest(handshake.prove_client(secret, stay, received), proof):
            return None
        grants = self._grants.get(handshake.key)
        return None if grants is None else (grants, secret)


def new_nonce() -> bytes:
    """A number that was never used before."""
    return secrets.token_bytes(NONCE_BYTES)


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
