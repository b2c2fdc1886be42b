"""Numbers at the ends of their ranges, in messages that are right otherwise: no core raises, and all invariants hold.

What is out of range never gets to a core (`tests/wire/test_ranges.py`).
"""

import json
from array import array
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.common.base.errors import ProtocolError
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.events import Tick
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import (
    Abort,
    Cancel,
    Candidate,
    Commit,
    CommitRefused,
    Committed,
    Envelope,
    FirstToken,
    Gone,
    Granted,
    HandedOver,
    HandoverFailed,
    Heartbeat,
    Job,
    Message,
    NodeLoad,
    Queued,
    Refused,
    Reserve,
    Revoke,
    Status,
    Tokens,
    TokensEntry,
    WantedRequest,
)
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.protocol.wire import decode, encode
from tests.support.prefill_bench import DECODES, WORKER, PrefillBench, request
from tests.unit.decode_node import test_decode as at_decode
from tests.unit.router.core import test_router as at_router

LIMITS = Limits()
EXTREMES = (0, 1, 5, 6, 2**20, 2**31 - 1, 2**32 - 1, 10**12, 2**53)
Path = tuple[str | int, ...]


def places(value: object, path: Path = ()) -> Iterator[Path]:
    """Where in a header there are integers."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def extreme(message: Message, data: st.DataObject) -> Message | None:
    """The message with some of its numbers changed; None when decoding refuses it."""
    sender = Incarnation("f" * 32)
    frames = [bytes(frame) for frame in encode(Envelope(sender, sender, message), LIMITS)]
    header = json.loads(frames[1])
    for path in data.draw(st.lists(st.sampled_from(list(places(header))), min_size=1, max_size=3)):
        reduce(getitem, path[:-1], header)[path[-1]] = data.draw(st.sampled_from(EXTREMES))
    try:
        return decode([frames[0], json.dumps(header).encode(), *frames[2:]], LIMITS).message
    except ProtocolError:
        return None


def some(data: st.DataObject, messages: list[Message], hear: Callable[[Message, float], object]) -> None:
    """A few of these messages arrive, with strange numbers."""
    for turn in range(4):
        message = extreme(data.draw(st.sampled_from(messages)), data)
        if message is not None:
            hear(message, 0.5 + turn / 10)


STRANGE = settings(max_examples=150)


@STRANGE
@given(st.data())
def test_a_decode_node(data: st.DataObject):
    bench = at_decode.Bench()
    bench.reserve()
    if data.draw(st.booleans()):
        bench.commit()
    key, worker, prefill = bench.key(), bench.worker, bench.prefill
    commit = Commit(
        key=key,
        num_pieces=2,
        first_token_pos=0,
        num_tokens=6,
        token_id=5,
    )
    line = WantedRequest(request_id=key.request_id, attempt=1, next_index=0, expected=True, resend=True)
    messages: list[Message] = [
        bench.message(key),
        commit,
        Abort(key=key),
        Heartbeat(heartbeat_no=9, as_of=1, wanted=(line,)),
    ]

    def hear(message: Message, now: float) -> None:
        if isinstance(message, Heartbeat):
            if worker.update_wanted(message, now):
                bench.done(bench.role.on_heartbeat(worker, now), now)
        else:
            bench.done(bench.role.on_message(prefill, message, now), now)

    some(data, messages, hear)
    for number in (0, 1):
        bench.arrives(number, 1.0)
    bench.done(bench.role.tick(1.1), 1.1)


@STRANGE
@given(st.data())
def test_a_prefill_node(data: st.DataObject):
    bench = PrefillBench()
    bench.link_up()
    reserve = next(a.message for a in bench.job() if isinstance(a, Send) and isinstance(a.message, Reserve))
    candidates = (Candidate(incarnation=DECODES[0], name="d0", endpoint="d0"),)
    job = Job(
        request_id=request(2),
        attempt=1,
        placement_no=2,
        spec=RequestSpec(
            model="m",
            prompt_token_ids=array("I", range(6)),
            output_token_ids=array("I", [7]),
            sampling=SamplingParams(max_new_tokens=4, seed=3, top_k=4, stop_token_ids=(9,)),
            priority=3,
            times_preempted=1,
        ),
        remaining_ms=9000,
        waited_ms=10,
        candidates=candidates,
    )
    key = reserve.key
    messages: list[Message] = [
        job,
        Cancel(request_id=request(1), attempt=1),
        Heartbeat(
            heartbeat_no=3,
            as_of=1,
            wanted=(WantedRequest(request_id=request(1), attempt=1, next_index=0, expected=True),),
        ),
        Granted(key=key, first_token=4),
        Queued(key=key),
        Refused(key=key, reason="full"),
        Committed(key=key, missing=(0, 1)),
        CommitRefused(key=key, reason="not_reserved"),
        Revoke(key=key, reason="time"),
        Status(status_no=9, steps_done=4, step_age_ms=3, load=NodeLoad(free_blocks=3, block_size=4)),
    ]

    def hear(message: Message, now: float) -> None:
        if isinstance(message, Job | Cancel | Heartbeat):
            bench.deliver(WORKER, message, now)
        else:
            bench.hear(DECODES[0], message, now)

    some(data, messages, hear)
    while bench.steps:
        bench.step(1.0)
    some(data, messages, hear)
    bench.handle(Tick(), 1.5)


@STRANGE
@given(st.data())
def test_a_router_worker(data: st.DataObject):
    bench = at_router.Bench()
    bench.submit()
    if data.draw(st.booleans()):
        bench.hand_over()
    name = at_router.REQUEST
    entry = TokensEntry(request_id=name, attempt=1, first_index=0, token_ids=(5, 6), finish="length", cached_tokens=1)
    from_decode: list[Message] = [Tokens(link_seq=2, entries=(entry,)), Gone(request_id=name, attempt=1, reason="lost")]
    from_prefill: list[Message] = [
        FirstToken(request_id=name, attempt=1, index=0, token_id=5, finish="stop"),
        HandedOver(request_id=name, attempt=1, decode=at_router.DECODE),
        HandoverFailed(request_id=name, attempt=1, reason="no_room", retained=True),
        Status(status_no=9, steps_done=4, step_age_ms=3, link_seq=8, load=NodeLoad(waiting_tokens=7, block_size=4)),
    ]

    def hear(message: Message, now: float) -> None:
        if message in from_decode or isinstance(message, Tokens | Gone):
            bench.receive(at_router.DECODE, "decode", message, now)
        else:
            bench.receive(at_router.PREFILL, "prefill", message, now)

    some(data, from_decode + from_prefill, hear)
    bench.core.handle(Tick(), 1.0)
    bench.core.check_invariants()
    bench.core.close(1.1)
