"""A bus, an engine and two policies in one's own trio program, on the real clock.

While the engine is busy, a request that nothing is resident of and one with a resident prefix come
in, in this order. They are served in the other.
"""

import trio

from hear import InferenceRequest
from hear.app.cluster import Cluster, running
from hear.blocks import chain_all, pack
from hear.codec import open_body
from hear.harnesses.session import HarnessSession
from hear.messages import OperationOutcome, RequestDescribed, RequestOutcome

BLOCK = 512


async def ask(cluster: Cluster, name: str, text: str, blocks: int, after_s: float = 0) -> None:
    """Say on the bus what is coming, and send it on the data path."""
    await trio.sleep(after_s)
    hashes = chain_all(f"{text} {number}".encode() for number in range(blocks))
    tokens, engine = blocks * BLOCK, cluster.engine_name
    harness = HarnessSession(cluster.bus, workflow=name, source=f"example/{name}")
    described = RequestDescribed(prompt_tokens=tokens, block_size=BLOCK, prefix_hashes=pack(hashes))
    harness.say(described, request=name, engine=engine)
    await cluster.engine.generate(
        InferenceRequest(id=name, prompt_tokens=tokens, output_tokens=4, prompt_hashes=hashes)
    )


async def main() -> None:
    """Run four requests, and listen to what becomes of them."""
    controls = 0
    async with (
        running(
            engine="simulated",
            profile="h100-qwen3-8b",
            block_size=BLOCK,
            policy="cache-aware+guard:40",
        ) as cluster,
        cluster.bus.subscribe(["outcome.>"], name="example") as outcomes,
    ):
        await ask(cluster, "first", "a report", 16)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, cluster, "long", "a book", 80)
            nursery.start_soon(ask, cluster, "cold", "a poem", 16, 0.1)
            nursery.start_soon(ask, cluster, "hot", "a report", 20, 0.2)
        await cluster.stop_policies()
        for envelope in await outcomes.receive():
            outcome, name = open_body(envelope), envelope.key.request
            if isinstance(outcome, RequestOutcome) and outcome.status == "completed":
                reused = sum(outcome.reused_tokens.values())
                print(f"{name}: {reused} of {outcome.prompt_tokens} prompt tokens reused")
            controls += isinstance(outcome, OperationOutcome) and outcome.status != "accepted"
    print(f"{controls} controls have ended, {cluster.num_open} are open")


if __name__ == "__main__":
    trio.run(main)
