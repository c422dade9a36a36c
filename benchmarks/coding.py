"""Messages to bytes and back."""

import random

from benchmarks.measuring import BLOCK_SIZE, ENGINE, Report, Sizes, no_gc, seconds_a_call
from hear.codec import decode, encode, open_body
from hear.delivery import Sequencer
from hear.messages import (
    BlocksStored,
    Envelope,
    Key,
    Message,
    Prioritise,
    RequestDescribed,
    ResidencyChanged,
)


def coding(sizes: Sizes, report: Report) -> None:
    """Messages to bytes and back."""
    draw = random.Random(3)
    state = Key(engine=ENGINE)
    about = Key(request="r1", context="c1", context_version=3, engine=ENGINE, workflow="w1")

    def residency(num_blocks: int) -> tuple[str, Message, Key]:
        stored = BlocksStored(tier="gpu", parent=1, prefix_hashes=draw.randbytes(8 * num_blocks))
        return f"{num_blocks:,} hashes", ResidencyChanged(changes=(stored,)), state

    cases: list[tuple[str, Message, Key]] = [
        residency(64),
        residency(8192),
        (
            "512 hashes",
            RequestDescribed(
                role="coder",
                turn=3,
                prompt_tokens=8200,
                block_size=BLOCK_SIZE,
                prefix_hashes=draw.randbytes(8 * 512),
            ),
            about,
        ),
        (
            "",
            Prioritise(priority=-512, reason="512 blocks to reuse"),
            Key(request="r1", engine=ENGINE, operation="cache-aware-1-17"),
        ),
    ]
    for size, message, key in cases:
        sequencer = Sequencer(ENGINE)
        frame = encode(sequencer.wrap(message, key, 1.0))
        envelope = decode(frame)
        what = " ".join(filter(None, (envelope.kind, size, f"({len(frame):,} bytes)")))

        def write(s: Sequencer = sequencer, m: Message = message, k: Key = key) -> bytes:
            return encode(s.wrap(m, k, 1.0))

        def read(f: bytes = frame) -> Envelope:
            return decode(f)

        def read_all(f: bytes = frame) -> Message | None:
            return open_body(decode(f))

        if open_body(envelope) != message:
            raise AssertionError(f"{what}: what was read is not what was written")
        with no_gc():
            for who, function in (
                ("decode the envelope, body raw", read),
                ("decode envelope and body", read_all),
                ("number, wrap and encode", write),
            ):
                taken = [
                    seconds_a_call(function, sizes.codec_sample_s) * 1e6
                    for _ in range(sizes.codec_repeats)
                ]
                report.add("encoding and decoding", what, who, "us", taken)
