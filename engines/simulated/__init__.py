"""A simulated engine: vLLM V1's scheduling and cache rules over a roofline of step times."""
