"""``hear run policy``: policies in a process of their own, on a running bus."""

import argparse

import structlog
import trio

from hear.app.cli import Command
from hear.app.clock import new_epoch
from hear.app.connection import add_bus_arguments, check_name, connected, run_until_signal
from hear.errors import PluginError
from hear.messages import DEFAULT_TENANT
from hear.policies.runtime.runner import PolicyRunner
from hear.policies.runtime.spec import parse

_log = structlog.get_logger("hear.policy")

LEAVE_S = 0.8
"""Time in which a policy that is stopped withdraws and hears its last answers."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "policy", help="its name or package.module:Class, with arguments: guard:40, mine:Policy:3"
    )
    parser.add_argument("--name", help="name on the bus, for a second one of its kind")
    parser.add_argument("--tenant", default=DEFAULT_TENANT, help="whose requests it serves")
    add_bus_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Carry out the command; 1 if the policy failed."""
    made = parse(namespace.policy).make()
    if len(made) != 1:
        raise PluginError(
            f"policy {namespace.policy!r}: {len(made)} policies, expected one for each process"
        )
    policy = made[0]
    name = check_name(namespace.name or policy.name)

    async def main(stopping: trio.Event) -> int:
        async with (
            connected(namespace.bus, name=name, key=namespace.key) as bus,
            trio.open_nursery() as nursery,
        ):
            runner = PolicyRunner(
                bus,
                policy,
                source=name,
                tenant=namespace.tenant,
                epoch=new_epoch(),
                leave_limit_s=LEAVE_S,
            )
            await nursery.start(runner.run)
            _log.info("policy.joined", policy=name, bus=namespace.bus)

            async def stop() -> None:
                await stopping.wait()
                runner.stop()

            nursery.start_soon(stop)
            await runner.stopped.wait()
            nursery.cancel_scope.cancel()
        return 1 if runner.statistics.failure else 0

    return run_until_signal(main)


RUN = Command("one policy, which leaves nothing behind when it is stopped", configure, run)
