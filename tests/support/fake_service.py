"""A TokenService in memory: deterministic tokens, and scripts that make it wait, fail, refuse or run out of time.

It keeps the contract of `router.api`, without nodes: streams end once, and a cancel is followed by the end.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import RequestId
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.router.api import (
    EndEvent,
    GenerateRequest,
    NodeStatus,
    Outcome,
    ServiceCounts,
    StreamEvent,
    TokensEvent,
    Usage,
)

MODEL = ModelInfo(
    name="m", vocab_size=32000, max_model_len=2560, max_position_embeddings=4096, eos_token_ids=(2,), default_top_k=50
)


@dataclass
class Script:
    """Behaviour of the streams submitted from now on."""

    tokens_per_event: int = 1
    hold_after: int | None = None
    """Wait before token number `hold_after` until the stream is cancelled or `release` is called."""
    end_after: int | None = None
    """End before token number `end_after` with `outcome` and `error`, instead of after max_new_tokens."""
    outcome: Outcome = "length"
    error: Exception | None = None
    raises: Exception | None = None
    """Raised by the iterator itself in place of the end: a bug of the service."""
    forget_end: bool = False
    """The iterator stops without an end event: another bug."""


def expected_token(request: GenerateRequest, index: int) -> int:
    """The token that the fake generates: a function of prompt, seed and absolute position."""
    position = len(request.spec.prompt_token_ids) + index
    text = request.spec.prompt_token_ids.tobytes() + b"%d,%d" % (request.spec.sampling.seed, position)
    return zlib.crc32(text) % MODEL.vocab_size


class FakeStream:
    """Events of one request, made on demand."""

    def __init__(self, request: GenerateRequest, script: Script) -> None:
        self.request = request
        self.request_id: RequestId = request.request_id
        self.cancelled_for: list[str] = []
        self.holding = asyncio.Event()
        """Set while the stream waits at its hold."""
        self.cancelled = asyncio.Event()
        self.ended = False
        self._script = script
        self._released = asyncio.Event()
        if script.hold_after is None:
            self._released.set()

    def release(self) -> None:
        """Continue after the hold."""
        self._released.set()

    def cancel(self, reason: str) -> None:
        self.cancelled_for.append(reason)
        self.cancelled.set()
        self._released.set()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self._events()

    async def _events(self) -> AsyncIterator[StreamEvent]:
        script, index = self._script, 0
        last = self.request.spec.sampling.max_new_tokens
        if script.end_after is not None:
            last = min(last, script.end_after)
        while index < last:
            if script.hold_after is not None and index >= script.hold_after:
                self.holding.set()
                await self._released.wait()
            if self.cancelled_for:
                yield self._end("cancelled", index, None)
                return
            size = min(script.tokens_per_event, last - index)
            if script.hold_after is not None and index < script.hold_after:
                size = min(size, script.hold_after - index)
            yield TokensEvent(index, tuple(expected_token(self.request, index + i) for i in range(size)))
            index += size
        if script.hold_after is not None and index == script.hold_after:
            self.holding.set()
            await self._released.wait()
            if self.cancelled_for:
                yield self._end("cancelled", index, None)
                return
        if script.raises is not None:
            raise script.raises
        if not script.forget_end:
            yield self._end(script.outcome, index, script.error)

    def _end(self, outcome: Outcome, num_tokens: int, error: Exception | None) -> EndEvent:
        self.ended = True
        return EndEvent(outcome, Usage(len(self.request.spec.prompt_token_ids), num_tokens, 1), "p0", "d0", error)


@dataclass
class FakeTokenService:
    """Serves `models` by `script`."""

    models_known: dict[str, ModelInfo] = field(default_factory=lambda: {MODEL.name: MODEL})
    script: Script = field(default_factory=Script)
    refusal: Exception | None = None
    """Raised by `submit`."""
    not_ready: str | None = None
    reported: ServiceCounts = field(default_factory=ServiceCounts)
    streams: list[FakeStream] = field(default_factory=list)
    submitted: "asyncio.Queue[FakeStream]" = field(default_factory=asyncio.Queue)
    """Every accepted stream, for a test that waits for it."""

    def model(self, name: str) -> ModelInfo | None:
        return self.models_known.get(name)

    def models(self) -> tuple[ModelInfo, ...]:
        return tuple(self.models_known.values())

    def not_ready_reason(self, model: str | None = None) -> str | None:
        return self.not_ready

    def submit(self, request: GenerateRequest) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        stream = FakeStream(request, self.script)
        self.streams.append(stream)
        self.submitted.put_nowait(stream)
        return stream

    def nodes(self) -> tuple[NodeStatus, ...]:
        return (NodeStatus("p0", ("prefill",), MODEL.name, "alive"), NodeStatus("d0", ("decode",), MODEL.name, "alive"))

    def counts(self) -> ServiceCounts:
        return self.reported

    def check_invariants(self) -> None:
        """Every stream must have ended or been cancelled."""
        for stream in self.streams:
            if not stream.ended and not stream.cancelled_for:
                raise InvariantError(f"request {stream.request_id} neither ended nor was cancelled")
