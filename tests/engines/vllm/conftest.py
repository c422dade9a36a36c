"""What tests of real vLLM share: they skip, with a reason, where it is not installed."""
