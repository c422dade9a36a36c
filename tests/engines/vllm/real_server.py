"""A real vLLM server for tests. It runs one request at a time, in 32 blocks of 32 tokens."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from hear.engines.vllm.launch.model import ModelShape, make_model
from hear.harnesses.eval.bench import servers

BLOCK = 32
NUM_BLOCKS = 32
READY_S = 240.0

# Deep and narrow: a step costs much for its layers, and a prompt no more than a step. So a long
# request is long on any machine, and prompts are short. (In float32, since what bfloat16 costs is
# another thing on a processor that has no instructions for it.)
_SHAPE = ModelShape(
    layers=64, hidden=64, intermediate=64, heads=1, kv_heads=1, head_dim=32, context=1024
)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where a server answers, and its process."""

    url: str
    kv_events: str
    kv_replay: str
    process: "subprocess.Popen[bytes]"

    def reset(self) -> None:
        """Empty its cache; it says so with the next request alone, so one follows."""
        with httpx.Client(base_url=self.url, timeout=30.0) as client:
            give_up = time.monotonic() + 30.0
            while not client.post("/reset_prefix_cache").json()["success"]:
                assert time.monotonic() < give_up, "the server's cache cannot be emptied"
            short = {"model": "tiny", "prompt": [7], "max_tokens": 1}
            client.post("/v1/completions", json=short).raise_for_status()


@contextmanager
def running_server(folder: Path) -> Iterator[RunningServer]:
    """Start one of a model made in ``folder``, and wait until it is ready.

    At the end it is killed, with its children. (It outlives many runs of trio, so it is none of a
    ``servers.running``.)
    """
    model = folder / "model"
    make_model(model, _SHAPE)
    events, replay, port = (servers.free_port() for _ in range(3))
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv@tiny",
    }
    options = {
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--max-num-seqs": "1",
        "--block-size": str(BLOCK),
        "--num-gpu-blocks-override": str(NUM_BLOCKS + 1),
        "--max-model-len": str(BLOCK * (NUM_BLOCKS - 1)),
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--scheduling-policy": "priority",
        "--kv-events-config": json.dumps(kv_events),
    }
    flags = ("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details")
    words = [word for option in options.items() for word in option]
    command = servers.stock_vllm("vllm", str(model), (*flags, *words), port=port)
    environment = {
        **os.environ,
        **command.environment,
        "VLLM_SERVER_DEV_MODE": "1",  # for its cache to be emptied, and to tell how it schedules
        "PYTHONHASHSEED": "0",
    }
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command.arguments, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield RunningServer(
                f"http://127.0.0.1:{port}",
                f"tcp://127.0.0.1:{events}",
                f"tcp://127.0.0.1:{replay}",
                process,
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    give_up = time.monotonic() + READY_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            time.sleep(0.25)  # of another process, whose start nobody can be told of
    raise AssertionError(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")
