"""A real vLLM server for tests. It runs one request at a time, in 32 blocks of 32 tokens."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

BLOCK = 32
NUM_BLOCKS = 32
READY_S = 240.0


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


def free_ports(number: int) -> list[int]:
    """Ports that nobody has now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def make_model(folder: Path) -> None:
    """Write down a model of four small layers; ``--load-format dummy`` makes its weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def running_server(model: Path, log: Path) -> Iterator[RunningServer]:
    """Start a server, and wait until it is ready. At the end it is killed, with its children."""
    port, events, replay = free_ports(3)
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv@tiny",
    }
    options = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--load-format": "dummy",
        "--dtype": "bfloat16",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-num-seqs": "1",
        "--block-size": str(BLOCK),
        "--num-gpu-blocks-override": str(NUM_BLOCKS + 1),
        "--max-model-len": str(BLOCK * (NUM_BLOCKS - 1)),
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--scheduling-policy": "priority",
        "--kv-events-config": json.dumps(kv_events),
    }
    flags = ("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details")
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for its cache to be emptied, and to tell how it schedules
        "PYTHONHASHSEED": "0",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    command += [word for option in options.items() for word in option]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
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
