"""What a command's coroutine returns or raises comes out of ``run`` as it is."""

import os
import signal
import time
from pathlib import Path

import pytest
import trio

from hear.app.connection import default_url, run
from hear.errors import BusError, ConfigError, HearError


async def _deep(*errors: BaseException) -> int:
    async def fail(error: BaseException) -> None:
        raise error

    async with trio.open_nursery() as outer, trio.open_nursery() as inner:
        for error in errors:
            outer.start_soon(fail, error)
        inner.cancel_scope.cancel()
    return 0


def test_the_exit_code_is_the_coroutines() -> None:
    async def main() -> int:
        now = trio.current_time()
        assert abs(now - time.time()) < 60  # Unix seconds
        return 3

    assert run(main) == 3


def test_an_error_comes_out_of_all_nurseries() -> None:
    with pytest.raises(ConfigError, match="here"):
        run(lambda: _deep(ConfigError("here")))
    with pytest.raises(HearError):
        run(lambda: _deep(ConfigError("one"), BusError("two")))
    with pytest.raises(ZeroDivisionError):  # which is worse than an error on purpose
        run(lambda: _deep(ConfigError("one"), ZeroDivisionError()))
    with pytest.raises(ExceptionGroup):
        run(lambda: _deep(KeyError(), ZeroDivisionError()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The timer that ends a process which is late must not end this one.
    monkeypatch.setattr("hear.app.connection.END_WITHIN_S", 3_600.0)

    async def main() -> int:
        os.kill(os.getpid(), number)
        with trio.fail_after(20):
            await trio.Event().wait()
        return 0

    assert run(main) == code


def test_a_folder_for_sockets_is_made_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("HEAR_BUS", raising=False)
    path = tmp_path / "hear"
    assert default_url() == f"ipc://{path}/bus"
