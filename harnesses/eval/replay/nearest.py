"""Which profile of the simulated engine is most like an engine that was recorded."""

from collections.abc import Iterable
from math import log

from hear.app import plugins
from hear.messages import CapabilitiesReported, CostsReported


def nearest_profile(
    capabilities: CapabilitiesReported,
    costs: CostsReported | None,
    profiles: Iterable[str],
    block_size: int,
) -> tuple[str, str]:
    """The profile that is nearest in room for KV and in speed, and in words how it differs.

    Room is compared in tokens of the GPU tier, speed in prompt tokens a second, each as a ratio.
    """

    def differs(name: str) -> tuple[float, str]:
        engine = plugins.load_installed("engines", "simulated")(
            name, block_size=block_size, name=name
        )
        theirs: CapabilitiesReported = engine.capabilities()
        ratios = {"GPU cache": _ratio(_room(theirs), _room(capabilities))}
        if costs is not None:
            speed = engine.costs().prefill_tokens_per_s
            ratios["prefill speed"] = _ratio(speed, costs.prefill_tokens_per_s)
        distance = sum(abs(log(r)) for r in ratios.values() if r is not None)
        if capabilities.model and capabilities.model != theirs.model:
            distance += 1.0
        parts = [f"{r:.2f} times its {what}" for what, r in ratios.items() if r is not None]
        return distance, " and ".join(parts)

    scored = {name: differs(name) for name in profiles}
    name = min(scored, key=lambda n: (scored[n][0], n))
    return name, scored[name][1]


def _room(capabilities: CapabilitiesReported) -> float:
    return sum(
        tier.num_blocks * capabilities.block_size
        for tier in capabilities.tiers
        if tier.name == "gpu"
    )


def _ratio(one: float, other: float) -> float | None:
    return one / other if one > 0 and other > 0 else None
