"""``hear status``: one look at a running cluster."""

import argparse
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime

from rich.table import Table

from hear.app import connection, console, output, plugins
from hear.app.cli import Command
from hear.app.log import to_stderr
from hear.buses.observe.tap.lines import of_tenant
from hear.buses.observe.tap.status import LOOK_S, EngineStatus, PolicyStatus, Status, look, to_json
from hear.escaping import MAX_PART, cell

_WIDE = 200  # columns where there is no terminal: a table in a file is not cut
_BAR = 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    connection.add_bus_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command; 2 if nobody is there."""
    name = connection.own_name("status")
    to_stderr("warning")

    async def main() -> int:
        async with connection.connected(namespace.bus, name=name, key=namespace.key) as bus:
            status = await look(bus, name=name, policies=plugins.names("policies"))
        return show(status, bus=namespace.bus, json=namespace.json)

    return connection.run(main)


def show(status: Status, *, bus: str, json: bool = False) -> int:
    """Print a status; returns the exit code."""
    if status.nobody:
        output.complain(f"no engine and no policy on {bus} (looked for {LOOK_S:g} s)")
        return 2
    with suppress(BrokenPipeError):
        if json:
            output.say_whole(to_json(status))
        else:
            output.say_drawn(text(status))
    return 0


def text(status: Status, width: int | None = None) -> output.Drawn:
    """The status as tables, for people."""
    made = console.Console(width=width) if width else console.of_results(_WIDE)
    return made.drawn(_parts(status))


def _parts(status: Status) -> Iterable[str | Table]:
    for engine in status.engines:
        yield _engine(engine)
        yield ""
    yield _policies(status)
    if departed := _departed(status):
        yield departed
    yield ""
    yield _subscribers(status)
    published = ", ".join(
        f"{n:,} {cell(category)}" for category, n in status.published.items() if n
    )
    if status.own_key_only:
        whose = "the participants with this key alone"
    else:
        whose = "all participants" if status.central else "this participant alone"
    yield f"published {published or 'nothing'}; {status.lagged} cut off for lagging ({whose})"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _engine(engine: EngineStatus) -> Table:
    table = _table("engine", cell(of_tenant(engine.name, engine.tenant)))
    if engine.heard_s_ago is None:
        table.add_row("", f"did not answer within {LOOK_S:g} s; known from the bus's history")
        return table
    if engine.missing:
        table.add_row("missing", f"did not answer for: {', '.join(engine.missing)}")
    table.add_row("epoch", f"{engine.epoch}, last word {engine.heard_s_ago:.1f} s ago")
    if engine.targets:
        table.add_row("pool of", cell(", ".join(engine.targets), MAX_PART))
    elif "capabilities" not in engine.missing:
        table.add_row("model", cell(engine.model) or "not named")
    if engine.num_waiting is not None:
        table.add_row("queue", f"{engine.num_waiting} waiting, {engine.num_running} running")
    for tier in engine.tiers:
        share = min((tier.used + tier.cached) / tier.num_blocks, 1.0) if tier.num_blocks else 0.0
        table.add_row(
            f"KV {cell(tier.tier)}",
            f"{bar(share)} {share:4.0%}  {tier.used:,} used, {tier.cached:,} cached of "
            f"{tier.num_blocks:,} blocks",
        )
    if engine.controls:
        table.add_row("controls", cell(", ".join(engine.controls), MAX_PART))
    if engine.modes:
        table.add_row("modes", cell(", ".join(engine.modes), MAX_PART))
    if engine.endpoint:
        table.add_row("endpoint", cell(engine.endpoint, MAX_PART))
    if engine.block_size:
        table.add_row("blocks", f"of {engine.block_size} tokens")
    return table


def bar(share: float, width: int = _BAR) -> str:
    """A share of 1 as a bar of characters."""
    full = round(share * width)
    return "█" * full + "░" * (width - full)


def _policies(status: Status) -> str | Table:
    if not status.policies:
        return "no policy is known" + ("" if status.remembers else ": this bus keeps no history")
    here = [policy for policy in status.policies if policy.subscribed is not False]
    table = _table("policy", "since", "here", "asked", "outcomes", "open")
    for policy in here:
        table.add_row(
            cell(of_tenant(policy.name, policy.tenant)),
            _since(policy),
            {True: "yes", False: "no", None: "?"}[policy.subscribed],
            _counts(policy.asked),
            _counts(policy.outcomes),
            str(policy.num_open),
        )
    return table


def _departed(status: Status) -> str:
    """Those that have left, in one line, however many there were since the bus began."""
    left = [policy for policy in status.policies if policy.subscribed is False]
    if not left:
        return ""
    names = ", ".join(of_tenant(policy.name, policy.tenant) for policy in left)
    num_open = sum(policy.num_open for policy in left)
    unanswered = f"; {num_open} of their operations were never answered" if num_open else ""
    return f"policies that have left: {cell(names, MAX_PART)}{unanswered}"


def _since(policy: PolicyStatus) -> str:
    if policy.since_s is None:
        return "-"
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(policy.since_s).strftime("%Y-%m-%d %H:%M:%S")
    return "?"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {cell(name)}" for name, number in counts.items()) or "none"


def _subscribers(status: Status) -> str | Table:
    if not status.subscribers:
        return "no subscriber is known"
    table = _table("subscriber", "unread", "received", "dropped")
    for row in status.subscribers:
        table.add_row(cell(row.name), f"{row.queued:,}", f"{row.received:,}", f"{row.dropped:,}")
    return table


COMMAND = Command("one look at a running cluster", configure, run)
