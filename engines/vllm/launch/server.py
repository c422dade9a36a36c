"""A running vLLM server, as it can be known over HTTP: what it is, and how it fares.

Owns the routes that are asked. What a page of metrics means is ``metrics_page``'s affair.
"""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import trio

from hear.endpoints import is_host, is_plain
from hear.engines.vllm.metrics_page import MetricsPage, read_page
from hear.errors import ConfigError, EngineError

ANSWER_S: Final = 5.0
"""How long the server may take to tell of itself; it does so beside its work."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server is. ``num_blocks`` can hold KV; ``priority`` is None where it does not tell.

    ``slower_tier``: it has been given a second tier of its cache.
    """

    version: str
    model: str
    max_model_len: int
    block_size: int
    num_blocks: int
    hash_algorithm: str
    caches_prefixes: bool
    slower_tier: bool
    priority: bool | None
    page: MetricsPage


def check_url(url: str) -> str:
    """See that a URL can be one of a server; returns it without a slash at the end.

    It is told on the bus as the server's endpoint, so there is no password in it.

    Raises:
        ConfigError: it cannot.
    """
    try:
        parts = urlsplit(url if is_plain(url) else "")
        good = parts.scheme in ("http", "https") and is_host(parts.hostname or "")
        good = good and (parts.port is None or parts.port > 0)
        good = good and parts.username is None and not parts.query and not parts.fragment
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"server {url!r:.200}: expected http://HOST:PORT of a vLLM server")
    return url.rstrip("/")


class VllmServer:
    """Asks one server. Its client is opened and closed by whoever made it."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url = check_url(url)
        self._client = client

    async def facts(self) -> ServerFacts:
        """What it is.

        Raises:
            EngineError: nobody answers, or no vLLM does, or it is not ready.
        """
        version = await self._json("/version")
        if not isinstance(version.get("version"), str):
            raise EngineError(f"{self.url}: no vLLM server: /version says {version!r:.80}")
        models = await self._json("/v1/models")
        page = await self.page()
        try:
            model = models["data"][0]
            name, length = str(model["id"]), int(model["max_model_len"] or 0)
            config = page.config or {}
            block_size = int(config["block_size"])
            num_blocks = int(config["num_gpu_blocks"]) - 1  # one of them stands for no block
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url}: no vLLM server that HEAR knows (it says version "
                f"{version['version']!r:.40}): model or cache are not told as expected: {error!r}"
            ) from error
        return ServerFacts(
            version=version["version"],
            model=name,
            max_model_len=length,
            block_size=block_size,
            num_blocks=max(num_blocks, 0),
            hash_algorithm=config.get("prefix_caching_hash_algo", ""),
            caches_prefixes=config.get("enable_prefix_caching", "True") != "False",
            slower_tier=config.get("kv_offloading_size", "None") != "None",
            priority=await self._has_priority(),
            page=page,
        )

    async def page(self) -> MetricsPage:
        """How it fares.

        Raises:
            EngineError: nobody answers, or it is no vLLM.
        """
        where = f"{self.url}/metrics"
        return read_page((await self._get("/metrics")).text, where)

    async def _has_priority(self) -> bool | None:
        # A server tells how it schedules only in development mode.
        try:
            told = await self._json("/server_info?config_format=json")
            policy = told["vllm_config"]["scheduler_config"]["policy"]
        except (EngineError, KeyError, TypeError):
            return None
        return bool(policy == "priority")

    async def _json(self, route: str) -> dict[str, Any]:
        answer = await self._get(route)
        try:
            told = answer.json()
        except ValueError as error:
            raise EngineError(
                f"{self.url}: no vLLM server: {route} is no JSON: {answer.text!r:.80}"
            ) from error
        if not isinstance(told, dict):
            raise EngineError(f"{self.url}: no vLLM server: {route} says {told!r:.80}")
        return told

    async def _get(self, route: str) -> httpx.Response:
        try:
            with trio.fail_after(ANSWER_S):
                answer = await self._client.get(self.url + route)
        except trio.TooSlowError as error:
            raise EngineError(f"{self.url}{route}: no answer within {ANSWER_S:g} s") from error
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}: no answer: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise EngineError(
                f"{self.url}: no vLLM server, or not ready: {route} answers {answer.status_code}"
            )
        return answer
