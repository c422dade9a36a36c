"""How long a step takes: the roofline of compute and memory traffic, transfers, and fixed cost."""

from hear.engines.simulated.profile import EngineProfile


class Roofline:
    """Actions and transfer times of one engine profile, all in seconds."""

    def __init__(self, profile: EngineProfile, block_size: int) -> None:
        model, gpu = profile.model, profile.gpu
        flops = gpu.flops_per_s * gpu.flops_efficiency
        memory = gpu.bytes_per_s * gpu.bytes_efficiency
        # Two operations a parameter and token; and a query-key pair costs two products of
        # head_dim, forward and back to values, in every head and layer.
        self._token_s = 2 * model.num_parameters / flops
        self._pair_s = 4 * model.num_layers * model.num_heads * model.head_dim / flops
        self._weights_s = model.num_parameters * model.bytes_per_parameter / memory
        self._kv_token_s = model.kv_bytes_per_token / memory
        self._fixed_s = gpu.step_s
        self.block_transfer_s = (
            block_size * model.kv_bytes_per_token / profile.tiers.transfer_bytes_per_s
        )

    def step_s(self, new_tokens: int, pairs: int, kv_tokens: int) -> float:
        """Time of one step over a batch.

        Args:
            new_tokens: tokens computed, prefill and decode together.
            pairs: query-key pairs of attention among and before them.
            kv_tokens: tokens whose KV has to be read.
        """
        compute_s = self._token_s * new_tokens + self._pair_s * pairs
        memory_s = self._weights_s + self._kv_token_s * kv_tokens
        return max(compute_s, memory_s) + self._fixed_s

    def prefill_tokens_per_s(self, chunk: int) -> float:
        """Prefill rate of a first chunk of ``chunk`` tokens."""
        return chunk / self.step_s(chunk, chunk * (chunk + 1) // 2, chunk)

    def decode_step_s(self, context_tokens: int) -> float:
        """Time of a decode step of one sequence."""
        return self.step_s(1, context_tokens, context_tokens)
