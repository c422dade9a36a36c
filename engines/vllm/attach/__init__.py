"""A vLLM server that runs by itself, joined to a bus from outside."""
