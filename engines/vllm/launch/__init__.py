"""Starting vLLM with HEAR inside: its options, its process, and what it needs."""
