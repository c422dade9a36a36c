"""Checks that any engine behind ``hear.interfaces.EngineBackend`` can be put through.

What the words of the protocol bind is a list of rules, each with an id that stays (``RULES``). An
engine is checked together with the worker that drives it, by the messages that come and go and by
what its clients are answered, so the same rules hold for the simulated engine, for a plug-in of
vLLM, and for one that can control hardly anything: a rule that needs a control which the engine
does not claim is checked the other way, since the answer must be ``unsupported``.

A check takes a factory and makes its own engines with it, and raises ``AssertionError`` that says
what was promised and what was seen. It must not know which engine it checks, nor any test
framework.
"""

from typing import Literal

from hear.engines.testing import (
    claims,
    effects,
    leases,
    life,
    once,
    state,
    submission,
    tenants,
    words,
)
from hear.engines.testing.bench import bench as _bench  # the module keeps its name
from hear.engines.testing.samples import ALL_KINDS, send_sample
from hear.engines.testing.setup import EngineFactory, EngineUnderTest, MakeRequest, Rule

__all__ = [
    "RULES",
    "EngineFactory",
    "EngineUnderTest",
    "MakeRequest",
    "Rule",
    "check_engine",
    "check_rule",
]

RuleResult = Literal["kept", "unsupported", "cannot be checked"]
"""How a rule was kept: as it says, or by ``unsupported``. It is unknown of an engine that cannot
be made to crash, or cannot show what it holds, where that is what the rule is about."""

RULES: dict[str, Rule] = {
    **words.rule,
    **state.rule,
    **life.rule,
    **once.rule,
    **effects.rule,
    **leases.rule,
    **claims.rule,
    **submission.rule,
    **tenants.rule,
}
"""All rules by id."""


async def check_engine(factory: EngineFactory) -> dict[str, RuleResult]:
    """Check all rules; returns how each was kept.

    Raises:
        AssertionError: one was not; the message says which, and what was seen.
    """
    return {id: await check_rule(id, factory) for id in RULES}


async def check_rule(id: str, factory: EngineFactory) -> RuleResult:
    """Check one rule; returns how it was kept.

    Raises:
        AssertionError: it was not; the message says what was promised and what was seen.
    """
    rule = RULES[id]
    try:
        async with _bench(factory) as b:
            missing = [kind for kind in rule.needs if not b.has(kind)]
            hidden = not b.engine.shows.issuperset(rule.looks_at)
            cannot_crash = rule.crashes and b.engine.crash is None
            for kind in ALL_KINDS:
                # What acts at submission has a rule of its own.
                if kind in missing and not b.claims(kind):
                    await b.end_of(send_sample(b, kind), "unsupported")
        if missing:
            return "unsupported"
        if hidden or cannot_crash:
            return "cannot be checked"
        await rule.check(factory)
    except (AssertionError, BaseExceptionGroup) as error:
        broken = _broken_promise(error)
        if broken is None:
            raise
        raise AssertionError(f"{id} ({rule.title}): {broken}") from error
    return "kept"


def _broken_promise(error: BaseException) -> AssertionError | None:
    """The first broken promise in what went wrong, which nurseries have wrapped in groups."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_broken_promise, error.exceptions)), None)
    return error if isinstance(error, AssertionError) else None
