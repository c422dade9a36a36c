"""The data path to any server that speaks OpenAI's protocol over HTTP.

Here only so that this can be found without h11, which it needs.
"""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from hear.errors import PluginError

if TYPE_CHECKING:
    from hear.harnesses.openai.client import OpenAIClient


def connect(endpoint: str) -> "AbstractAsyncContextManager[OpenAIClient]":
    """Reach the server at ``endpoint`` (``client.connect``).

    Raises:
        PluginError: h11 is not installed.
    """
    try:
        from hear.harnesses.openai import client
    except ModuleNotFoundError as error:
        raise PluginError(
            f"{endpoint}: needs {error.name}: pip install 'hear-protocol[openai]'"
        ) from error
    return client.connect(endpoint)
