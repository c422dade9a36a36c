"""The options that every command has which joins an engine's worker to a bus."""

import argparse

from hear.engines.worker.loop import MAX_NAME, MAX_TENANTS, can_be_named
from hear.errors import ConfigError
from hear.messages import DEFAULT_TENANT


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--ranks`` and ``--tenant``; ``parse_ranks`` and ``tenants_of`` read them."""
    parser.add_argument(
        "--ranks",
        default="",
        metavar="POLICY=N,...",
        help="ranks of policies in arbitration; higher prevails (0 for all)",
    )
    parser.add_argument(
        "--tenant",
        action="append",
        metavar="NAME",
        help="who is told of the engine before its first request; may be given several times "
        f"({DEFAULT_TENANT})",
    )


def tenants_of(namespace: argparse.Namespace) -> tuple[str, ...]:
    """Whom ``--tenant`` names, each once.

    Raises:
        ConfigError: one cannot be named on a bus, or there are more than an engine serves.
    """
    tenants = tuple(dict.fromkeys(namespace.tenant or (DEFAULT_TENANT,)))
    for tenant in tenants:
        if not can_be_named(tenant):
            raise ConfigError(
                f"--tenant {tenant!r:.80}: expected a name of 1 to {MAX_NAME} characters"
            )
    if len(tenants) > MAX_TENANTS:
        raise ConfigError(f"--tenant: got {len(tenants)}, expected {MAX_TENANTS} at most")
    return tenants


def parse_ranks(text: str) -> dict[str, int]:
    """What ``--ranks`` says.

    Raises:
        ConfigError: it is no list of policies and whole numbers.
    """
    ranks: dict[str, int] = {}
    for word in filter(None, text.split(",")):
        policy, equals, number = word.rpartition("=")
        try:
            ranks[policy] = int(number)
        except ValueError:
            equals = ""
        if not (policy and equals):
            raise ConfigError(f"--ranks {word!r}: expected POLICY=NUMBER, as in cache-aware=2")
    return ranks
