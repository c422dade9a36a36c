"""Chats with their text: ShareGPT's conversations, and requests of OpenAI's protocol.

A prompt is the tokens of its messages one after another, each with the name of its role. No chat
template is applied, so lengths are a few tokens a message off, and what two prompts have in common
is what they have in truth.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, field

from hear.errors import ConfigError
from hear.harnesses.eval.workloads.lines import (
    File,
    beginning,
    read_document,
    read_lines,
    read_rows,
)
from hear.harnesses.eval.workloads.traces.tokens import Encode
from hear.harnesses.eval.workloads.traces.trace import (
    Budget,
    Milliseconds,
    Name,
    Tokens,
    Trace,
    TracedRequest,
)

SHAREGPT = "sharegpt"
OPENAI = "openai"
BLOCK_SIZE: Final = 16
"""vLLM's. Prompts of chats are short beside larger blocks."""

ANSWER_TOKENS: Final = 256
"""Of an answer whose length nobody tells."""

ANSWERS: Final = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})


class Said(Struct, frozen=True, kw_only=True):
    """One message of ShareGPT's."""

    by: str = field(name="from")
    value: str


class Conversation(Struct, frozen=True, kw_only=True):
    """One conversation of ShareGPT's."""

    conversations: list[Said]


class Message(Struct, frozen=True, kw_only=True):
    """One message of OpenAI's."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        """What it holds of text, and its calls of tools."""
        content = self.content or ""
        if isinstance(content, list):
            parts = (part.get("text", "") for part in content if isinstance(part, dict))
            content = "".join(part for part in parts if isinstance(part, str))
        return content + (_json(self.tool_calls) if self.tool_calls else "")


class Body(Struct, frozen=True, kw_only=True):
    """The body of a request for a chat."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[Any] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None


class Line(Struct, frozen=True, kw_only=True):
    """A request: a line of OpenAI's batch files, with a ``body``, or its messages themselves.

    ``session_id``, ``timestamp``, ``delay`` (both in milliseconds) and ``output_length`` are as in
    traces of Mooncake's form.
    """

    body: Body | None = None
    messages: list[Message] = []
    tools: list[Any] | None = None
    session_id: Name | None = None
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    output_length: Tokens | None = None


def read_sharegpt(files: Sequence[File], first: int | None, encode: Encode) -> Trace:
    """Read conversations, of all together the ``first``; each answer in one is a request.

    Raises:
        ConfigError: a file, or a line of it, cannot be used, or nobody answers in any.
    """
    requests: list[TracedRequest] = []
    budget = Budget()
    for number, (where, conversation) in enumerate(islice(_conversations(files), first)):
        prompt: list[int] = []
        for said in conversation.conversations:
            tokens = encode(f"{said.by}\n{said.value}\n")
            if said.by in ANSWERS and prompt:
                budget.take(where, prompt)
                requests.append(
                    TracedRequest(
                        where=where,
                        prompt_tokens=len(prompt),
                        output_tokens=max(1, len(tokens)),
                        token_ids=tuple(prompt),
                        session=number,
                    )
                )
            prompt.extend(tokens)
    return _trace(SHAREGPT, files, requests, "an answer of the assistant in a conversation")


def _conversations(files: Sequence[File]) -> Iterator[tuple[str, Conversation]]:
    """The conversations of files that are each a JSON array, or one JSON object a line."""
    for path in files:
        if beginning(path, 1 << 10).lstrip().startswith(b"["):
            for number, conversation in enumerate(read_document(path, list[Conversation])):
                yield f"{path}[{number}]", conversation
        else:
            for number, conversation in read_lines(path, Conversation):
                yield f"{path}:{number}", conversation


def read_openai(files: Sequence[File], first: int | None, encode: Encode) -> Trace:
    """Read requests, one a line.

    An answer is as long as its line tells, as the assistant's message that ends it, or as the most
    that was allowed.

    Raises:
        ConfigError: a file or a line cannot be used.
    """
    requests: list[TracedRequest] = []
    guessed = 0
    budget = Budget()
    for where, line in read_rows(files, Line, first):
        body = line.body
        messages = line.messages if body is None else body.messages
        tools = line.tools if body is None else body.tools
        if not messages:
            raise ConfigError(f"{where}: messages: got none, expected at least one")
        prompt = list(encode(f"{_json(tools)}\n")) if tools else []
        texts = [encode(f"{message.role}\n{message.text}\n") for message in messages]
        answer: int | None = line.output_length
        if len(texts) > 1 and messages[-1].role in ANSWERS:
            answer = len(texts.pop()) if answer is None else answer
        if answer is None and body is not None:
            most = body.max_completion_tokens
            answer = body.max_tokens if most is None else most
        if answer is None:
            answer = ANSWER_TOKENS
            guessed += 1
        for text in texts:
            prompt.extend(text)
        budget.take(where, prompt)
        requests.append(
            TracedRequest(
                where=where,
                prompt_tokens=max(1, len(prompt)),
                output_tokens=max(1, answer),
                token_ids=tuple(prompt),
                at_s=None if line.timestamp is None else line.timestamp / 1000,
                think_s=None if line.delay is None else line.delay / 1000,
                session=line.session_id,
            )
        )
    remarks = (
        (f"{guessed:,} answers have no length, and are taken to have {ANSWER_TOKENS} tokens",)
        if guessed
        else ()
    )
    return _trace(OPENAI, files, requests, "a request on a line", remarks)


def _trace(
    name: str,
    files: Sequence[File],
    requests: Sequence[TracedRequest],
    expected: str,
    remarks: Iterable[str] = (),
) -> Trace:
    if not requests:
        raise ConfigError(f"{files[0]}: got no request at all, expected {expected}")
    return Trace(
        format=name, block_size=BLOCK_SIZE, requests=tuple(requests), remarks=tuple(remarks)
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
