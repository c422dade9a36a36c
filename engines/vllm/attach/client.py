"""The requests of an attached server's own client, and the priorities that go with them.

A server takes a priority along with a request, and none for one that it has. So a priority that is
asked for acts on a request that has been announced and is not yet sent. What is seen of the server
otherwise is ``attached_watch``'s affair.
"""

from collections.abc import Callable
from functools import partial

import httpx
import structlog
import trio

from hear.engines.vllm.attach.requests import (
    Completion,
    OwnRequest,
    OwnRequests,
    body_of,
    converse,
    result_of,
)
from hear.engines.vllm.attach.watch import Watch
from hear.engines.vllm.identity import Tenants
from hear.errors import EngineError
from hear.interfaces import ApplyResult, InferenceRequest, OperationEnded, Report
from hear.messages import OperationOutcome, Prioritise, RequestOutcome
from hear.operation import Operation, Ref

_log = structlog.get_logger("hear.attach")


class AttachedClient:
    """Sends requests to the server that is watched, and tells of them."""

    def __init__(
        self,
        watch: Watch,
        http: httpx.AsyncClient,
        tenants: Tenants,
        tell: Callable[[Report], None],
        *,
        answer_s: float,
    ) -> None:
        self.requests = OwnRequests()
        self._watch = watch
        self._http = http
        self._tenants = tenants
        self._tell = tell
        self._answer_s = answer_s
        self._kept: dict[Ref, Ref] = {}  # operations to be completed when a request is taken
        self._lost = False
        self._back = trio.Event()

    # -- priorities ---------------------------------------------------------------------------

    def prioritise(self, operation: Operation, control: Prioritise) -> ApplyResult:
        """Take a priority for a request that is about to be sent."""
        ref = operation.request_ref
        own = self.requests.get(ref)
        if own is None or own.sent:
            return ApplyResult("rejected", "already_submitted")
        own.priority = control.priority
        self._kept[operation.ref] = ref
        return ApplyResult("accepted")

    def revert(self, operation: Operation) -> None:
        """Forget the priority of a request that has not been sent yet."""
        ref = self._kept.pop(operation.ref, None)
        own = None if ref is None else self.requests.get(ref)
        if own is not None and not own.sent:
            own.priority = own.request.priority

    def _let_go(self, own: OwnRequest) -> list[str]:
        """The operations on a request, which are not kept any longer."""
        done = [operation for operation, request in self._kept.items() if request == own.ref]
        for operation in done:
            del self._kept[operation]
        return [id for _, id in done]

    # -- the server goes and comes ------------------------------------------------------------

    def lose(self) -> None:
        """The server has gone, and all requests with it; what comes waits for ``come_back``."""
        self._lost = True
        self._back = trio.Event()
        self._kept.clear()
        self.requests.lose()

    def come_back(self) -> None:
        """The server is there again."""
        self._lost = False
        self._back.set()

    # -- the way of a request -----------------------------------------------------------------

    async def complete(self, request: InferenceRequest) -> Completion:
        """Send a request and wait for its last token, or for its refusal.

        Raises:
            EngineError: it has no prompt, or its tenant has one of the same id being served.
        """
        if not len(request.prompt):
            raise EngineError(f"request {request.id!r}: expected a prompt, text or ids of tokens")
        with trio.move_on_after(self._answer_s):
            while self._lost:
                await self._back.wait()
        own = self.requests.begin(request)
        self._tenants.add(request.tenant)
        tell = partial(Report, tenant=request.tenant)
        self._tell(tell(arrived=[own.key]))
        self._tell(tell(queue=self.requests.changed(own, "waiting")))  # with its priority
        outcome = RequestOutcome(status="failed", reason="client_gone")
        try:
            tell_all = self._watch.publishes and not self._watch.follower.known
            outcome = await self._serve(own, body_of(own, self._watch.facts.model, tell_all))
        finally:
            self._let_go(own)
            self.requests.end(own)
            if not own.lost:  # else whoever drives this engine says so as it begins a new epoch
                moved = self.requests.changed(own, "ended")
                self._tell(tell(queue=moved, requests=[(own.key, outcome)]))
        return Completion(result_of(own, outcome), own.token_ids)

    async def _serve(self, own: OwnRequest, body: object) -> RequestOutcome:
        broken = False
        with own.scope, trio.move_on_after(self._answer_s):
            try:
                return await converse(
                    own,
                    self._http,
                    self._watch.url,
                    body,
                    on_sent=partial(self._sent, own),
                    on_first=partial(self._started, own),
                )
            except httpx.HTTPError as error:
                broken = True
                _log.warning("request.broken", request=own.request.id, error=repr(error))
        if broken and not own.lost and await self._watch.is_gone():
            self._watch.doubt()
            own.lost = True
        return RequestOutcome(
            status="failed", reason="engine_restarted" if own.lost else "engine_error"
        )

    def _sent(self, own: OwnRequest) -> None:
        outcome = OperationOutcome(status="completed", control="prioritise")
        ended = [OperationEnded(id, outcome) for id in self._let_go(own)]
        accepted = (own.key, RequestOutcome(status="accepted"))
        self._tell(Report(tenant=own.tenant, operations=ended, requests=[accepted]))

    def _started(self, own: OwnRequest) -> None:
        self._tell(Report(tenant=own.tenant, queue=self.requests.changed(own, "started")))
