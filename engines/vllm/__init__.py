"""Real vLLM, from inside its engine and from beside it. Only modules in here import vllm."""
