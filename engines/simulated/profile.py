"""What a simulated engine is: a model on a GPU, its tiers and its scheduler's limits.

Profiles are TOML files; those of the paper ship beside this module, any other is given by path.
"""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from hear.app.config import load_toml, where
from hear.app.plugins import nearest
from hear.errors import ConfigError

# TOML knows inf, and integers without end; nothing here is either.
Positive = Annotated[float, Meta(gt=0, lt=1e30)]
Rate = Annotated[float, Meta(ge=1e6, lt=1e30)]  # slower, and no step would end
Share = Annotated[float, Meta(ge=0.001, le=1)]
PositiveInt = Annotated[int, Meta(gt=0, lt=2**53)]
NotNegative = Annotated[float, Meta(ge=0, lt=1e30)]


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dense transformer in numbers. Weights take ``bytes_per_parameter`` each."""

    name: str
    num_parameters: Positive
    bytes_per_parameter: Positive = 2.0
    num_layers: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    kv_bytes_per_token: PositiveInt


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak rates of a GPU and the share of each that serving reaches; ``step_s`` is fixed cost."""

    name: str
    flops_per_s: Rate
    flops_efficiency: Share
    bytes_per_s: Rate
    bytes_efficiency: Share
    step_s: NotNegative = 0.003


class Tiers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Room for KV. An inclusive second tier keeps copies of what the GPU holds or held; an
    exclusive one takes over what the GPU evicts. ``transfer_bytes_per_s`` is each way."""

    gpu_kv_gib: Positive
    cpu_kv_gib: NotNegative = 0.0
    cpu: Literal["inclusive", "exclusive"] = "inclusive"
    transfer_bytes_per_s: Rate = 25e9


class Scheduler(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the scheduler, by vLLM's names, and HEAR's on leases.

    ``order`` is vLLM's scheduling policy. With ``reserve_full_prompt`` a request is admitted only
    when its whole prompt would fit, as recent vLLM does, and else when its first chunk does.
    """

    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 8192
    max_model_len: PositiveInt = 40_960
    order: Literal["priority", "fcfs"] = "priority"
    reserve_full_prompt: bool = True
    retention_decay_s: Positive = 400.0
    max_lease_s: Positive = 7200.0


class EngineProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole simulated engine."""

    name: str
    model: Model
    gpu: Gpu
    tiers: Tiers
    scheduler: Scheduler = Scheduler()

    def num_blocks(self, tier: Literal["gpu", "cpu"], block_size: int) -> int:
        """How many blocks of ``block_size`` tokens a tier has room for."""
        gib = self.tiers.gpu_kv_gib if tier == "gpu" else self.tiers.cpu_kv_gib
        return int(gib * 2**30 // (block_size * self.model.kv_bytes_per_token))


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = files("hear.engines.simulated") / "profiles"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


def load_profile(name: str, block_size: int | None = None) -> EngineProfile:
    """Load a shipped profile by name, or any by the path of its TOML file.

    With ``block_size`` (tokens) it is also checked that the GPU has room for a block.

    Raises:
        ConfigError: there is none, or the file does not describe one.
    """
    if name.endswith(".toml") or "/" in name:
        return _load(Path(name), block_size)
    known = shipped_profiles()
    if name not in known:
        raise ConfigError(f"no engine named {name!r}: {nearest(name, known)}, or a .toml file")
    with as_file(files("hear.engines.simulated") / "profiles" / f"{name}.toml") as path:
        return _load(path, block_size)


def _load(path: Path, block_size: int | None) -> EngineProfile:
    profile = load_toml(path, EngineProfile)
    if block_size is None:
        return profile
    if block_size < 1:
        raise ConfigError(f"block size of {block_size} tokens, expected 1 or more")
    if not profile.num_blocks("gpu", block_size):
        gib = block_size * profile.model.kv_bytes_per_token / 2**30
        raise ConfigError(
            f"{where(path, 'tiers.gpu_kv_gib')}: tiers.gpu_kv_gib: {profile.tiers.gpu_kv_gib:g} "
            f"has no room for a block of {block_size} tokens, which takes {gib:.3g}"
        )
    return profile
