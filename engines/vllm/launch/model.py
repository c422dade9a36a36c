"""A generated model: a small Qwen3 with a tokenizer of its own, so that nothing has to be fetched.

Its answers mean nothing, but it costs what a model of its shape costs, and what it answers depends
on all of its prompt. (With vLLM's ``--load-format dummy`` it would not: those weights are so small
that the last token alone decides, and a cache that returned rubbish would not be noticed.) For the
same shape the files are the same, byte for byte. Needs neither vLLM nor torch.
"""

import json
from collections import Counter
from itertools import pairwise
from math import log2
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

from hear.errors import ConfigError

VOCABULARY = 512
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's size. In bfloat16 the KV of a token is 4 * layers * kv_heads * head_dim bytes."""

    layers: _Size = 4
    hidden: _Size = 256
    intermediate: _Size = 768
    heads: _Size = 4
    kv_heads: _Size = 2
    head_dim: _Size = 64
    context: _Size = 8192


def make_model(folder: Path, shape: ModelShape | None = None) -> None:
    """Write a model of a shape into a new folder. If the very same is there, nothing is changed.

    Raises:
        ConfigError: the shape is impossible, the folder holds something else, or cannot be written.
    """
    shape = shape or ModelShape()
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            f"kv-heads: got {shape.kv_heads}, expected a divisor of {shape.heads} heads"
        )
    if shape.head_dim % 2:
        raise ConfigError(f"head-dim: got {shape.head_dim}, expected an even number")
    files = {
        "config.json": _config(shape),
        "generation_config.json": {"eos_token_id": 0},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SPECIAL[0],
            "pad_token": _SPECIAL[0],
            "model_max_length": shape.context,
            "chat_template": _CHAT,
        },
    }
    written = {name: json.dumps(c, indent=1).encode() + b"\n" for name, c in files.items()}
    written["model.safetensors"] = _weights(shape)
    try:
        if folder.exists() and any(folder.iterdir()):
            if {p.name: p.is_file() and p.read_bytes() for p in folder.iterdir()} != written:
                raise ConfigError(f"{folder}: is not empty, expected a new folder for the model")
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in reversed(written):  # config.json is what makes it a model, so it comes last
            (folder / name).write_bytes(written[name])
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _weights(shape: ModelShape) -> bytes:
    """The weights in the safetensors format: a length, a header in JSON, and the numbers."""
    chance = Random(0)
    tensors: dict[str, tuple[list[int], bytes]] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        # Numbers whose size keeps that of what is multiplied with them.
        exponent = round(127 - log2(1.53 * columns**0.5))
        tensors[f"{name}.weight"] = [rows, columns], _numbers(chance, rows * columns, exponent)

    def norm(name: str, size: int, weight: bytes = b"\x80\x3f") -> None:
        tensors[f"{name}.weight"] = [size], weight * size

    matrix("model.embed_tokens", VOCABULARY, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm", shape.hidden)
        matrix(f"{at}.self_attn.q_proj", shape.heads * shape.head_dim, shape.hidden)
        matrix(f"{at}.self_attn.k_proj", shape.kv_heads * shape.head_dim, shape.hidden)
        matrix(f"{at}.self_attn.v_proj", shape.kv_heads * shape.head_dim, shape.hidden)
        matrix(f"{at}.self_attn.o_proj", shape.hidden, shape.heads * shape.head_dim)
        # 4.0 makes attention pick a few tokens, wherever they stand; 1.0 would blur them all.
        norm(f"{at}.self_attn.q_norm", shape.head_dim, b"\x80\x40")
        norm(f"{at}.self_attn.k_norm", shape.head_dim)
        norm(f"{at}.post_attention_layernorm", shape.hidden)
        matrix(f"{at}.mlp.gate_proj", shape.intermediate, shape.hidden)
        matrix(f"{at}.mlp.up_proj", shape.intermediate, shape.hidden)
        matrix(f"{at}.mlp.down_proj", shape.hidden, shape.intermediate)
    norm("model.norm", shape.hidden)

    header: dict[str, Any] = {}
    end = 0
    for name, (sizes, data) in tensors.items():
        begin, end = end, end + len(data)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [len(text).to_bytes(8, "little"), text, *(data for _, data in tensors.values())]
    return b"".join(parts)


def _numbers(chance: Random, count: int, exponent: int) -> bytes:
    """Numbers in bfloat16 with random signs and fractions, and one exponent (of base 2, plus 127).

    So no library of arrays is needed: sign, exponent and fraction take 1, 8 and 7 bits.
    """
    free = int.from_bytes(b"\x7f\x80" * count, "little")
    fixed = int.from_bytes((exponent << 7).to_bytes(2, "little") * count, "little")
    bits = chance.getrandbits(16 * count) & free | fixed
    return bits.to_bytes(2 * count, "little")


_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = """
the agent reads the file and calls a tool with the name of the function and its arguments as json
the tool returns a result and the agent looks at it before it decides which step of the plan is next
a user asks the assistant to find the error in the code and to run the tests again after each change
the engine keeps the context of a conversation in its cache so that a later turn of it starts sooner
search query answer message system content value string number list path line output input request
schedule priority request block prefix memory token prompt decode evict retain release worker policy
import return class def self for while if else true false none print open read write close test main
"""


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE of 512 tokens: the special ones, the 256 bytes, and merges of common pairs.

    Trained here, on a few lines, since a library's training may differ from version to version.
    """
    byte_tokens = _byte_tokens()
    merges = _merges(byte_tokens, VOCABULARY - len(_SPECIAL) - len(byte_tokens))
    tokens = [*_SPECIAL, *byte_tokens, *(left + right for left, right in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def _byte_tokens() -> list[str]:
    """How byte-level tokenizers write each byte as a character that can be seen (as in GPT-2)."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


def _merges(byte_tokens: list[str], count: int) -> list[tuple[str, str]]:
    """The pairs of tokens that byte-pair encoding joins; of pairs as common, the first in order."""
    words: Counter[tuple[str, ...]] = Counter(
        tuple(byte_tokens[byte] for byte in f" {word}".encode()) for word in _TEXT.split()
    )
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        joined: Counter[tuple[str, ...]] = Counter()
        for word, times in words.items():
            joined[_join(word, best)] += times
        words = joined
    return merges


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    joined: list[str] = []
    for token in word:
        if joined and (joined[-1], token) == pair:
            joined[-1] += token
        else:
            joined.append(token)
    return tuple(joined)
