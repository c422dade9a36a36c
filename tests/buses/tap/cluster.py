"""A hub and a small cluster in a process of its own, which serves one request after another.

``python -m tests.buses.tap.cluster URL`` says ``ready`` when it serves, and ends with its input.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from hear.app import connection
from hear.buses.nng.server import hub
from tests.buses.tap.scene import Load, serving

_END_WITHIN_S = 10.0
_NUM_CLIENTS = 12
_NUM_CONTEXTS = 4


@contextmanager
def in_another_process(url: str) -> Iterator["subprocess.Popen[str]"]:
    """The cluster at this address, ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.buses.tap.cluster", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            for line in process.stdout:
                if line == "ready\n":  # after what the parts log
                    break
            else:
                raise AssertionError("the cluster has ended before it was ready")
            yield process
        finally:
            process.kill()
            process.stdin.close()
            process.wait(_END_WITHIN_S)


async def _serve(url: str) -> int:
    async with (
        hub(url),
        connection.connected(url, name="cluster") as bus,
        serving(bus) as cluster,
        trio.open_nursery() as nursery,
    ):
        load = Load(cluster)

        async def client(number: int) -> None:
            turn = 0
            while True:
                turn += 1
                await load.turn(f"r{number}.{turn}", f"c{number % _NUM_CONTEXTS}", turn)

        for number in range(_NUM_CLIENTS):
            nursery.start_soon(client, number)
        print("ready", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(connection.run(lambda: _serve(sys.argv[1])))
