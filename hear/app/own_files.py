"""Whether a folder, a socket or a file is this user's own, seen before it is used.

Another user of the machine may have been there first: in ``/tmp`` everyone may make a folder, a
socket or a link under any name that is free. What is not as it has to be is refused in one line:
what is there, whose it is, what was expected, and what to do.

To look first and to use then is sound here. In a folder that is this user's, and that nobody else
may write to, nobody else can put one thing in the place of another (root can, and may do all in any
case). Nor can they swap the folder, since the one above it is guarded in the same way, or sticky as
``/tmp`` is, where a thing can be moved or removed by its owner alone. A secret is looked at through
the descriptor that it is read from.

Knows nothing of buses and clusters: which paths have to be whose is said by who calls.
"""

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from hear.errors import ConfigError

_WRITTEN_BY_OTHERS: Final = 0o022
_WRITTEN_BY_ALL: Final = 0o002
_NOT_PRIVATE: Final = 0o027
"""Others may do anything, or the group may write. A group may read: that of a service does."""


def is_trusted(uid: int) -> bool:
    """Whether what belongs to a user is believed: this one's, and root's."""
    return uid in (os.getuid(), 0)


def own_folder(path: Path, *, make: bool = True) -> bool:
    """See that nobody else can change what is in a folder; returns whether it is there.

    With ``make`` it is made if it is not there.

    Raises:
        ConfigError: others can, it is no folder, or it cannot be made.
    """
    try:
        if make:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        elif not os.path.lexists(path):
            return False
        found, above = path.lstat(), path.parent.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be used for sockets: {error.strerror}") from error
    own = found.st_uid == os.getuid()
    if not stat.S_ISDIR(found.st_mode) or not own or found.st_mode & _WRITTEN_BY_OTHERS:
        raise ConfigError(
            f"{path}: is {_described(found)}, expected a folder of this user that nobody else may "
            f"write to, mode 0700: {_remedy(found, path)}set XDG_RUNTIME_DIR or give --bus"
        )
    sticky = above.st_mode & stat.S_ISVTX
    if not is_trusted(above.st_uid) or (above.st_mode & _WRITTEN_BY_OTHERS and not sticky):
        raise ConfigError(
            f"{path.parent}: is {_described(above)}, so others could replace {path.name!r} in it; "
            "expected one of this user or root that nobody else may write to: set XDG_RUNTIME_DIR "
            "or give --bus"
        )
    return True


def check_socket(path: Path) -> None:
    """See that a socket to connect to is this user's or root's. One that is not there passes.

    Raises:
        ConfigError: it is another's.
    """
    try:
        # Who owns a link chooses where it leads.
        found = [path.lstat(), path.stat()]
    except OSError:
        return
    for status in found:
        if not is_trusted(status.st_uid):
            raise ConfigError(
                f"{path}: is {_described(status)}, expected a socket of this user or root: whoever "
                "listens there would hear and could say everything. To join another user's bus, "
                "give a key (--key FILE) that its hub knows"
            )


def check_free(path: Path) -> None:
    """See that listening at a path removes nothing but a socket.

    Whoever binds a socket removes the one of a process that was killed, and nng any other file too.

    Raises:
        ConfigError: something else is there.
    """
    try:
        found = path.lstat()
    except OSError:
        return  # nothing is there, or binding will tell
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(
            f"{path}: is {_described(found)}, expected a socket or nothing: remove it, or give "
            "another path"
        )


def read_own(path: Path, *, secret: bool = True) -> str:
    """Read a text that decides whom to believe, and that others must not know if it is a secret.

    Raises:
        ConfigError: it cannot be read, others may change it (or read it), or it is another user's.
    """
    try:
        # Not to wait for who writes into a pipe; what kind of file it is shows once it is open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: cannot be read: it is not a file")
            refused = _NOT_PRIVATE if secret else _WRITTEN_BY_OTHERS
            if not is_trusted(status.st_uid) or status.st_mode & refused:
                raise ConfigError(
                    f"{path}: {'holds a secret and ' if secret else ''}is {_described(status)}, "
                    "expected one of this user or root that others cannot "
                    f"{'read or write' if secret else 'write'}: "
                    f"chmod {600 if secret else 644} {path}"
                )
            with open(descriptor, encoding="utf-8", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def check_opened(descriptor: int, path: Path) -> None:
    """See that a file that is written on from life to life is not one that others have written.

    Raises:
        ConfigError: it is another user's, or everyone may write to it.
    """
    status = os.fstat(descriptor)
    if not is_trusted(status.st_uid) or (
        stat.S_ISREG(status.st_mode) and status.st_mode & _WRITTEN_BY_ALL
    ):
        raise ConfigError(
            f"{path}: is {_described(status)}, expected one of this user or root that others "
            f"cannot write: give another path, or chmod 600 {path}"
        )


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a new file to write to. A link that was laid in its place is removed, not followed.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)  # of one that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return open(os.open(path, flags, mode), "wb")


def _described(status: os.stat_result) -> str:
    """What is there and whose, as in: a folder of alice (uid 1001), mode 0777."""
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a file"),
    )
    kind = next((name for is_one, name in kinds if is_one(status.st_mode)), "a device or pipe")
    try:
        user = f"{pwd.getpwuid(status.st_uid).pw_name} (uid {status.st_uid})"
    except KeyError:
        user = f"uid {status.st_uid}"
    return f"{kind} of {user}, mode {stat.S_IMODE(status.st_mode):04o}"


def _remedy(status: os.stat_result, path: Path) -> str:
    """What helps beside another place, if this user can do it."""
    if status.st_uid != os.getuid():
        return ""
    return f"chmod 700 {path}, or " if stat.S_ISDIR(status.st_mode) else "remove it, or "
