"""What all tests share: how Hypothesis searches. HYPOTHESIS_PROFILE=explore searches at random."""

import os

from hypothesis import settings

# The same examples in every run, so that a failure in CI is one at any desk, and no deadline, since
# the machines of CI are shared.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
