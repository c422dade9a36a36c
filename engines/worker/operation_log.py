"""What became of each operation, on disk, so that a worker that is killed acts on none twice.

A worker notes an operation before it acts, and its end before it tells of it. The one that comes
after reads that some have ended, and answers the same again; and that others have begun, and fails
them as ``engine_restarted``. What is written survives the process, not the machine: a power cut may
cost the last entries.

Owns the file. It must not know what a control does.
"""

import fcntl
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final

import msgspec

from hear.app.connection import make_own_folders
from hear.app.own_files import check_opened, open_new
from hear.codec import UNREADABLE
from hear.engine_operations import KeyedOutcome
from hear.errors import ConfigError
from hear.messages import DEFAULT_TENANT, Key, OperationOutcome

_LENGTH_BYTES: Final = 4
_MAX_ENTRY_BYTES: Final = 1 << 20
_OPEN: Final = ("accepted",)


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    key: Key
    outcome: OperationOutcome | None
    control: str
    tenant: str = DEFAULT_TENANT


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Entry)


def _framed(entry: _Entry) -> bytes:
    data = _encoder.encode(entry)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class OperationLog:
    """The operations of one engine, across the lives of its workers."""

    def __init__(self, path: Path, *, remember: int = 65_536) -> None:
        """Open the log at ``path``, and read what is there.

        Args:
            remember: ends that are kept of each tenant; must cover the time for which senders ask
                again.

        Raises:
            ConfigError: the file cannot be opened, or is another's.
        """
        self.path = path
        self._remember = remember
        self._begun: dict[tuple[str, str], tuple[Key, str]] = {}  # by tenant and operation
        self._ended: dict[str, OrderedDict[str, KeyedOutcome]] = {}  # by tenant
        self._num_entries = 0
        make_own_folders(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._read()
        except OSError as error:
            raise ConfigError(f"operation log {path}: cannot be used: {error.strerror}") from error

    @property
    def tenants(self) -> list[str]:
        """Whose operations have ended."""
        return list(self._ended)

    def ended(self, tenant: str = DEFAULT_TENANT) -> list[KeyedOutcome]:
        """How the operations of a tenant have ended, oldest first."""
        return list(self._ended.get(tenant, {}).values())

    def fail_interrupted(self) -> None:
        """End what an earlier worker had begun and did not end."""
        for (tenant, _), (key, control) in list(self._begun.items()):
            outcome = OperationOutcome(
                status="failed",
                control=control,
                reason="engine_restarted",
                detail="its worker was lost",
            )
            self.note(KeyedOutcome(key, outcome), tenant)

    def begin(self, key: Key, control: str, tenant: str = DEFAULT_TENANT) -> None:
        """Note an operation that is about to be acted on.

        Raises:
            OSError: it cannot be written.
        """
        if key.operation is not None and (tenant, key.operation) not in self._begun:
            self._write(_Entry(key, None, control, tenant))
            self._begun[tenant, key.operation] = key, control

    def note(self, answer: KeyedOutcome, tenant: str = DEFAULT_TENANT) -> None:
        """Note an answer that is about to be told.

        Raises:
            OSError: it cannot be written.
        """
        key, outcome = answer.key, answer.outcome
        if outcome.status in _OPEN:
            self.begin(key, outcome.control, tenant)
        elif key.operation is not None and key.operation not in self._ended.get(tenant, ()):
            self._write(_Entry(key, outcome, outcome.control, tenant))
            self._take(tenant, answer)
            remembered = self._remember * len(self._ended)
            if self._num_entries > 4 * remembered + 2 * len(self._begun):
                self._rewrite()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    # -- the file -----------------------------------------------------------------------------

    def _open(self) -> int:
        """Open the file, for this worker alone."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            check_opened(file, self.path)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise ConfigError(f"operation log {self.path}: another worker uses it") from None
        except ConfigError:
            os.close(file)
            raise
        return file

    def _take(self, tenant: str, answer: KeyedOutcome) -> None:
        operation = answer.key.operation
        assert operation is not None
        self._begun.pop((tenant, operation), None)
        ended = self._ended.setdefault(tenant, OrderedDict())
        ended[operation] = answer
        if len(ended) > self._remember:
            ended.popitem(last=False)

    def _write(self, entry: _Entry) -> None:
        os.write(self._file, _framed(entry))
        self._num_entries += 1

    def _read(self) -> None:
        data = self.path.read_bytes()
        at = 0
        while at + _LENGTH_BYTES <= len(data):
            size = int.from_bytes(data[at : at + _LENGTH_BYTES], "big")
            end = at + _LENGTH_BYTES + size
            if size > _MAX_ENTRY_BYTES:
                raise ConfigError(f"operation log {self.path}: no entry of one at byte {at}")
            if end > len(data):
                break
            try:
                entry = _decoder.decode(data[at + _LENGTH_BYTES : end])
            except UNREADABLE as error:
                raise ConfigError(
                    f"operation log {self.path}: no entry of one at byte {at}: {error}"
                ) from error
            self._num_entries += 1
            if entry.outcome is not None:
                self._take(entry.tenant, KeyedOutcome(entry.key, entry.outcome))
            elif entry.key.operation is not None:
                self._begun[entry.tenant, entry.key.operation] = entry.key, entry.control
            at = end
        if at < len(data):
            # The last worker was killed as it wrote. What it wrote of it was never told to anyone.
            os.ftruncate(self._file, at)

    def _rewrite(self) -> None:
        """Leave out what is no longer remembered."""
        entries = [
            _Entry(answer.key, answer.outcome, answer.outcome.control, tenant)
            for tenant, ended in self._ended.items()
            for answer in ended.values()
        ]
        entries += [
            _Entry(key, None, control, tenant)
            for (tenant, _), (key, control) in self._begun.items()
        ]
        beside = self.path.with_name(f"{self.path.name}.new")
        with open_new(beside, 0o600) as file:
            file.writelines(map(_framed, entries))
        beside.replace(self.path)
        os.close(self._file)
        self._file = self._open()
        self._num_entries = len(entries)
