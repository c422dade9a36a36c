"""Requests to a vLLM, real or not, as the rules of conformance want them."""

from dataclasses import replace
from hashlib import blake2b

from hear.engines.vllm.hashing import prefix_hashes
from hear.engines.vllm.identity import salt_of
from hear.interfaces import InferenceRequest

FIRST, LAST = 16, 500
"""Tokens that the generated model has, none of them a special one."""


def tokens_of(context: str, number: int) -> list[int]:
    """The first tokens of a context's history."""
    tokens = []
    for index in range(number):
        digest = blake2b(f"{context}/{index}".encode(), digest_size=4).digest()
        tokens.append(FIRST + int.from_bytes(digest, "little") % (LAST - FIRST))
    return tokens


def make_request(
    block_size: int, id: str, *, context: str, num_blocks: int, output_tokens: int
) -> InferenceRequest:
    """As ``hear.engines.testing.MakeRequest`` wants it."""
    prompt = tokens_of(context, num_blocks * block_size + 1)
    return InferenceRequest(
        id=id,
        prompt_tokens=len(prompt),
        output_tokens=output_tokens,
        prompt_hashes=prefix_hashes(prompt, block_size),
        context=context,
        prompt=prompt,
    )


def of_tenant(block_size: int, request: InferenceRequest, tenant: str) -> InferenceRequest:
    """The same request, of another tenant."""
    assert not isinstance(request.prompt, str)
    salt = salt_of(tenant, None)
    hashes = prefix_hashes(request.prompt, block_size, cache_salt=salt)
    return replace(request, tenant=tenant, prompt_hashes=hashes)
