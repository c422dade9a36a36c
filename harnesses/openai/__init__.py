"""The data path to any server that speaks OpenAI's protocol over HTTP.

Here only so that this can be found without h11, which it needs.
"""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from hear.app import plugins

if TYPE_CHECKING:
    from hear.harnesses.openai.client import OpenAIClient


def connect(endpoint: str) -> "AbstractAsyncContextManager[OpenAIClient]":
    """Reach the server at ``endpoint`` (``client.connect``).

    Raises:
        ConfigError: h11 is not installed.
    """
    with plugins.extra("openai", endpoint, "h11"):
        from hear.harnesses.openai import client
    return client.connect(endpoint)
