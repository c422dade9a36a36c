"""Names that attack a terminal or a log, a scene in which all have one, and what may be seen."""

import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from hear.blocks import pack
from hear.delivery import Sequencer
from hear.messages import (
    CapabilitiesReported,
    ContextOpened,
    Envelope,
    Key,
    OperationOutcome,
    PressureReported,
    Prioritise,
    QueueChanged,
    RequestDescribed,
    RequestOutcome,
    Route,
    TierPressure,
    WaitingRequest,
    WorkflowDescribed,
)
from hear.recording import Header, Recorder

FORGED = "12:00:00.000000 [info     ] forged"
NAMES = {
    "title": "\x1b]0;owned\x07",
    "colour": "\x1b[31mred",
    "erase": "\x1b[2J\x1b[H",
    "c1": "\x9b31mred",
    "overwrite": "good\rbad",
    "backspace": "good\x08\x08\x08\x08bad\x7f",
    "line": f"x\n{FORGED}",
    "separator": f"x\u2028{FORGED}",
    "next-line": f"x\x85{FORGED}",
    "override": "abc\u202egnp",
    "isolate": "\u2066x\u2069",
    "mark": "r\u200f1",
    "zero-width": "r\u200b1",
    "tag": "r\U000e00411",
    "selector": "r\ufe0f1",
    "filler": "r\u31641",
    "markup": "[red]x[/red] [link=http://e.com]y[/link] [/]",
    "emoji": ":smile:",
    "long": "a" * 10_000,
    "long words": "aa " * 4_000,
}
UNSEEN = {chr(0x034F), chr(0x2800), chr(0x3164), *map(chr, range(0xFE00, 0xFE10))}
LONGEST_LINE = 10_000


def check(text: str, *, longest: int = LONGEST_LINE) -> None:
    """Nothing in this steers a terminal, hides, or begins a line that somebody else has written."""
    bad = {c for c in text if c != "\n" and not _may_be_seen(c)}
    assert not bad, f"{bad} in {text[:400]!r}"
    lines = text.split("\n")
    assert not [line for line in lines if line.lstrip("│ ").startswith(FORGED[:20])]
    assert max(map(len, lines)) <= longest


def check_json(text: str) -> object:
    """The same of JSON, which is whole: nothing is cut from it."""
    check(text, longest=1_000_000)
    return json.loads(text)


def _may_be_seen(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] != "C" and category not in ("Zl", "Zp") and character not in UNSEEN


def scene(name: str) -> list[Envelope]:
    """An engine, a policy and a harness, and one request to its end; all names are this one."""
    tier = TierPressure(tier=name, num_blocks=8, used=2)
    waiting = WaitingRequest(request=name, since_s=10.0, priority=-3)
    of_request = Key(request=name, context=name, engine=name, workflow=name)
    asked = Key(request=name, context=name, engine=name, operation=name)
    routed = Key(request=name, engine=name, operation=f"{name}2")
    harness, engine, policy = (Sequencer(name, tenant=name) for _ in range(3))
    return [
        engine.wrap(
            CapabilitiesReported(
                model=name, controls=(name,), modes=(name,), endpoint=name, block_size=16
            ),
            Key(engine=name),
            9.0,
        ),
        engine.wrap(PressureReported(tiers=(tier,)), Key(engine=name), 9.0),
        harness.wrap(WorkflowDescribed(roles=(name,)), Key(workflow=name), 9.0),
        harness.wrap(ContextOpened(role=name), Key(context=name), 9.0),
        harness.wrap(
            RequestDescribed(
                role=name,
                stage=name,
                turn=1,
                prompt_tokens=64,
                block_size=16,
                prefix_hashes=pack((1, 2, 3, 4)),
                depends_on=(name,),
            ),
            of_request,
            10.0,
        ),
        engine.wrap(RequestOutcome(status="accepted"), of_request, 10.0),
        engine.wrap(QueueChanged(waiting=(waiting,)), Key(engine=name), 10.0),
        policy.wrap(Prioritise(priority=-1, reason=name, fallback=()), asked, 10.5),
        engine.wrap(
            OperationOutcome(status="rejected", control=name, reason=name, detail=name),
            asked,
            10.6,
        ),
        policy.wrap(Route(targets=(name,), reason=name), routed, 10.7),
        engine.wrap(OperationOutcome(status="completed", control="route"), routed, 10.8),
        engine.wrap(QueueChanged(started=(name,)), Key(engine=name), 12.0),
        engine.wrap(
            RequestOutcome(
                status="completed",
                reason=name,
                mode=name,
                prompt_tokens=64,
                output_tokens=4,
                reused_tokens={name: 16},
                queue_s=2.0,
                prefill_s=0.5,
                decode_s=0.5,
            ),
            of_request,
            13.0,
        ),
    ]


def recorded(path: Path, heard: Iterable[Envelope], cut_off: str = "") -> Path:
    """The same in a recording."""
    recorder = Recorder(Header(clock="unix", bus="tcp://hub"))
    parts = [recorder.begin(), *(recorder.hear([e], e.time_s) for e in heard)]
    path.write_bytes(b"".join([*parts, recorder.cut_off(11.0, cut_off)]))
    return path
