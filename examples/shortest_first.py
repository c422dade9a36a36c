"""A policy of one's own: the request with the least left to compute goes first.

hear replay mooncake --window 0:120 --policy fcfs,examples.shortest_first:ShortestFirst
"""

from collections.abc import Iterable

from hear import Ask, EngineViews, HarnessView, Key
from hear.blocks import unpack
from hear.messages import Prioritise, QueueChanged


class ShortestFirst:
    name = "shortest-first"
    observes: tuple[str, ...] = ("intent.*.*.request_described.>", "state.>")

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        for engine, message in s.changes:
            for waiting in message.waiting if isinstance(message, QueueChanged) else ():
                request = h.requests.get(waiting.request)
                if request is None or not engine.residency_known:
                    continue
                prompt = request.description
                resident = engine.residency.match(unpack(prompt.prefix_hashes))
                left = prompt.prompt_tokens - resident * prompt.block_size
                if left != waiting.priority:
                    key = Key(request=waiting.request, engine=engine.name)
                    yield Ask(Prioritise(priority=left, reason=f"{left} tokens to go"), key)
