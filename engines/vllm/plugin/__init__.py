"""HEAR inside vLLM's engine: the scheduler, the cache, and the bridge to HEAR's thread."""
