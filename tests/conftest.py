"""What all tests share: how Hypothesis searches, the log, and that vLLM is there if it has to be.

HYPOTHESIS_PROFILE=explore searches at random. With HEAR_REQUIRE_VLLM a run fails if a test was
skipped because vLLM is not installed.
"""

import logging
import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# The same examples in every run, so that a failure in CI is one everywhere, and no deadline, since
# the machines of CI are shared.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Commands that a test runs set the log up; the next test finds it as if none had."""
    yield
    structlog.reset_defaults()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn a run that was to test with vLLM, and did not, into a failed one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("HEAR_REQUIRE_VLLM") or reporter is None:
        return
    reasons = [str(report.longrepr) for report in reporter.stats.get("skipped", ())]
    missed = [reason for reason in reasons if "vllm" in reason and "not installed" in reason]
    if missed:
        reporter.ensure_newline()
        reporter.write_line(f"{len(missed)} tests need vLLM: {missed[0]}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
