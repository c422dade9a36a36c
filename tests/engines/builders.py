"""Small engines, and requests for them. A block is 16 tokens."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

from hear.blocks import chain_all
from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.profile import EngineProfile, Gpu, Model, Scheduler, Tiers
from hear.engines.simulated.request import SimRequest
from hear.engines.testing import EngineFactory, EngineUnderTest
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import DEFAULT_TENANT
from hear.operation import Ref
from tests.engines.integrity import check_engine

BLOCK = 16
KV_BYTES = 1024  # of one token


def profile(
    *,
    gpu: int = 16,
    cpu: int = 0,
    tier: Literal["inclusive", "exclusive"] = "inclusive",
    seqs: int = 4,
    budget: int = 64,
    order: Literal["priority", "fcfs"] = "priority",
    reserve: bool = True,
    transfer_bytes_per_s: float = 4e6,
) -> EngineProfile:
    """An engine with room for ``gpu`` and ``cpu`` blocks. A step takes about 10 ms."""
    gib = BLOCK * KV_BYTES / 2**30
    return EngineProfile(
        name="small",
        model=Model(
            name="tiny",
            num_parameters=1e6,
            num_layers=2,
            num_heads=2,
            head_dim=8,
            kv_bytes_per_token=KV_BYTES,
        ),
        gpu=Gpu(
            name="slow",
            flops_per_s=1e10,
            flops_efficiency=1.0,
            bytes_per_s=1e9,
            bytes_efficiency=1.0,
            step_s=0.005,
        ),
        tiers=Tiers(
            gpu_kv_gib=(gpu + 0.5) * gib,
            cpu_kv_gib=(cpu + 0.5) * gib if cpu else 0.0,
            cpu=tier,
            transfer_bytes_per_s=transfer_bytes_per_s,
        ),
        scheduler=Scheduler(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            order=order,
            reserve_full_prompt=reserve,
        ),
    )


def own(name: str) -> Ref:
    """A name of the default tenant."""
    return DEFAULT_TENANT, name


def hashes_of(context: str, num_blocks: int) -> list[int]:
    """The first blocks of a context's history."""
    return chain_all(f"{context}/{index}".encode() for index in range(num_blocks))


def request(
    id: str,
    *,
    context: str | None = None,
    num_blocks: int = 1,
    output_tokens: int = 1,
    extra_tokens: int = 1,
    tenant: str = DEFAULT_TENANT,
) -> InferenceRequest:
    """A prompt of whole blocks of a context's history and a few tokens more."""
    return InferenceRequest(
        id=id,
        prompt_tokens=num_blocks * BLOCK + extra_tokens,
        output_tokens=output_tokens,
        prompt_hashes=hashes_of(context or id, num_blocks),
        context=context,
        tenant=tenant,
    )


def sim_request(id: str, seq: int, *, arrival_s: float = 0.0, **fields: int) -> SimRequest:
    """A request as it stands in the queue."""
    made = SimRequest(request(id), arrival_s, seq, "dense")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def make_request(id: str, *, context: str, num_blocks: int, output_tokens: int) -> InferenceRequest:
    return request(id, context=context, num_blocks=num_blocks, output_tokens=output_tokens)


def _output(request: InferenceRequest, result: InferenceResult) -> object:
    return result.outcome.status, result.outcome.prompt_tokens, result.outcome.output_tokens


@asynccontextmanager
async def _under_test(made: EngineProfile) -> AsyncIterator[EngineUnderTest]:
    engine = SimulatedEngine(made, block_size=BLOCK, name="e0")
    yield EngineUnderTest(
        name="e0",
        backend=engine,
        client=engine,
        make_request=make_request,
        long_output_tokens=300,
        output_of=_output,
        quiet_s=0.1,
        patience_s=60.0,
        crash=engine.crash,
        check=lambda: check_engine(engine),
    )


def under_test(made: EngineProfile) -> EngineFactory:
    """A factory of simulated engines for the conformance rules."""
    return partial(_under_test, made)


SETUPS: dict[str, EngineFactory] = {
    "inclusive": under_test(profile(gpu=32, cpu=64, seqs=1)),
    "exclusive": under_test(profile(gpu=32, cpu=40, tier="exclusive", seqs=1)),
    "one tier": under_test(profile(gpu=32, seqs=1)),
    "fcfs": under_test(profile(gpu=32, cpu=64, seqs=1, order="fcfs")),
}
