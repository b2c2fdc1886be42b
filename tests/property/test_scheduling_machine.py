"""The scheduler under random adds, reservations, inherits, aborts, pins and failures, with one or two steps in flight.

With and without host blocks for swapping. After every rule the invariants of pools, queue and sequences must hold. The
fake runner copies and computes a step only when the step finishes, and checks every KV slot that it reads. At the end
all sequences run to completion, and nothing may be left.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.common.base.errors import ProtocolError, RequestInvalidError
from kvferry.common.scheduling.events import (
    ChunkComputed,
    Failed,
    Finished,
    Preempted,
    Prefilled,
    Sampled,
    SchedulerEvent,
    Started,
)
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceSpec, SequenceStatus
from kvferry.common.scheduling.step import StepBatch
from tests.support.scheduling import FakeNode, ids, make_spec, next_token

NUM_BLOCKS, SIZE = 12, 2
SWAPPED_OUT = (SequenceStatus.SWAPPING, SequenceStatus.SWAPPED)
MAX_PREEMPT = 2
EOS = frozenset({0, 1})
PROMPTS = st.lists(st.integers(5, 6), min_size=1, max_size=10)
SPECS = st.builds(
    make_spec,
    PROMPTS,
    mode=st.sampled_from(["prefill", "decode"]),
    priority=st.integers(1, 5),
    accepted_at=st.floats(-30, 0),
    max_new_tokens=st.integers(1, 12),
    times_preempted=st.integers(0, MAX_PREEMPT),
    ignore_eos=st.booleans(),
)
CONFIGS = st.builds(
    SchedulerConfig,
    eos_token_ids=st.just(EOS),
    max_step_tokens=st.integers(4, 12),
    max_chunk_tokens=st.integers(0, 3),
    max_running=st.integers(1, 4),
    max_steps_in_flight=st.integers(1, 2),
    max_preemptions=st.just(MAX_PREEMPT),
    watermark_blocks_share=st.sampled_from([0.0, 0.1, 0.3]),
    swap_wait_s=st.sampled_from([0.4, 2.0, 100.0]),
)
OVERLOAD_CONFIGS = st.builds(
    SchedulerConfig,
    eos_token_ids=st.just(EOS),
    max_step_tokens=st.just(12),
    max_running=st.just(4),
    max_steps_in_flight=st.integers(1, 2),
    max_preemptions=st.just(MAX_PREEMPT),
    watermark_blocks_share=st.just(0.0),
    swap_wait_s=st.sampled_from([0.4, 2.0, 100.0]),
)


class EventModel:
    """The state of one sequence according to its events."""

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.ids = ids(spec.token_ids)
        self.computed = 0
        self.started = False
        self.over = False

    def apply(self, event: SchedulerEvent) -> None:
        assert not self.over, "an event after the end"
        match event:
            case Started(num_cached_tokens=cached):
                assert not self.started
                self.started, self.computed = True, cached
            case ChunkComputed(token_start=start, token_end=end):
                assert self.started
                assert start == self.computed < end <= len(self.ids)
                self.computed = end
            case Sampled(token_id=token_id, position=position, index=index):
                assert position == len(self.ids), "a token repeated or left out"
                assert index == position - self.spec.num_prompt_tokens
                assert token_id == next_token(self.ids), "not the token of an undisturbed run"
                self.ids.append(token_id)
                self.computed = position
            case Prefilled(num_tokens=num_tokens, token_id=token_id, index=index):
                assert self.spec.mode == "prefill"
                assert (num_tokens, token_id) == (len(self.ids) - 1, self.ids[-1])
                assert index == num_tokens - self.spec.num_prompt_tokens
            case Finished(reason=reason):
                self.over = True
                stopped = self.ids[-1] in EOS and not self.spec.sampling.ignore_eos
                assert reason == ("stop" if stopped else "length")
                assert stopped or len(self.ids) == self.spec.num_prompt_tokens + self.spec.sampling.max_new_tokens
            case Failed():
                self.over = True
            case Preempted():
                self.over = True
                assert self.spec.times_preempted < MAX_PREEMPT


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS, num_host_blocks=st.sampled_from([0, 4, 12]))
    def start(self, config, num_host_blocks):
        self.begin(config, num_host_blocks)

    def begin(self, config, num_host_blocks):
        self.config = config
        self.node = FakeNode(config, num_blocks=NUM_BLOCKS, block_size=SIZE, num_host_blocks=num_host_blocks)
        self.scheduler = self.node.scheduler
        self.now = 0.0
        self.models: dict[int, EventModel] = {}
        """All sequences that may still have events."""
        self.pins: dict[int, int] = {}
        self.in_flight: list[StepBatch] = []

    # --- helpers ---

    def check_events(self, events: list[SchedulerEvent]) -> None:
        for event in events:
            self.models[event.seq_id].apply(event)
            if self.models[event.seq_id].over:
                del self.models[event.seq_id]

    def with_status(self, *statuses: SequenceStatus) -> list[int]:
        return sorted(seq_id for seq_id in self.models if self.scheduler.status(seq_id) in statuses)

    def pick(self, data: st.DataObject, *statuses: SequenceStatus) -> int | None:
        found = self.with_status(*statuses)
        return data.draw(st.sampled_from(found)) if found else None

    def retry_of(self, data: st.DataObject, old: EventModel) -> SequenceSpec:
        """Another attempt at the request, with some of its sampled tokens."""
        outputs = old.ids[old.spec.num_prompt_tokens :]
        kept = data.draw(st.integers(0, min(len(outputs), old.spec.sampling.max_new_tokens - 1)))
        return make_spec(
            old.ids[: old.spec.num_prompt_tokens],
            outputs[:kept],
            mode=old.spec.mode,
            priority=old.spec.priority,
            accepted_at=old.spec.accepted_at,
            max_new_tokens=old.spec.sampling.max_new_tokens,
            times_preempted=old.spec.times_preempted,
            ignore_eos=old.spec.sampling.ignore_eos,
        )

    # --- sequences ---

    @rule(specs=st.lists(SPECS, min_size=1, max_size=3))
    def add(self, specs):
        for spec in specs:
            self.add_one(spec)

    def add_one(self, spec: SequenceSpec) -> None:
        try:
            self.models[self.scheduler.add(spec, self.now)] = EventModel(spec)
        except RequestInvalidError:
            assert spec.max_kv_tokens > NUM_BLOCKS * SIZE

    @rule(data=st.data())
    def inherit_blocks(self, data):
        old_id = self.pick(data, *(set(SequenceStatus) - {SequenceStatus.ENDED}))
        if old_id is None:
            return
        spec = self.retry_of(data, self.models[old_id])
        new_id = self.scheduler.inherit_blocks(old_id, spec, self.now)
        del self.models[old_id]
        self.models[new_id] = EventModel(spec)

    @rule(spec=SPECS)
    def reserve(self, spec):
        try:
            self.scheduler.check(spec)
        except RequestInvalidError:
            assert spec.max_kv_tokens > NUM_BLOCKS * SIZE
            return
        reservation = self.scheduler.reserve(spec, self.now)
        if reservation is not None:
            assert not self.with_status(*SWAPPED_OUT), (
                "a new sequence was admitted before the swapped-out ones returned"
            )
            assert reservation.first_token % SIZE == 0
            assert reservation.first_token <= spec.num_known
            self.models[reservation.seq_id] = EventModel(spec)

    @rule(data=st.data())
    def commit(self, data):
        seq_id = self.pick(data, SequenceStatus.RESERVED)
        if seq_id is not None:
            self.scheduler.commit(seq_id)

    @rule(data=st.data(), lie=st.booleans())
    def activate(self, data, lie):
        seq_id = self.pick(data, SequenceStatus.RESERVED, SequenceStatus.COMMITTED)
        if seq_id is None:
            return
        model = self.models[seq_id]
        spec = model.spec
        first = self.scheduler.num_computed_tokens(seq_id)
        known = spec.num_known
        if lie:
            wrong = data.draw(st.sampled_from([known + 1, known - 2, *([] if spec.is_retry else [known - 1])]))
            try:
                self.scheduler.activate(seq_id, 7, wrong, self.now)
            except ProtocolError:
                return
            raise AssertionError("a hand-over of a wrong length was accepted")
        resumes_at_last_id = spec.is_retry and data.draw(st.booleans())
        num_tokens = known - 1 if resumes_at_last_id else known
        self.node.receive(seq_id, spec, first, num_tokens)
        token = spec.token_ids[-1] if resumes_at_last_id else next_token(spec.token_ids)
        if resumes_at_last_id:
            model.ids.pop()
        self.check_events(self.scheduler.activate(seq_id, token, num_tokens, self.now))

    @rule(data=st.data())
    def release(self, data):
        seq_id = self.pick(data, SequenceStatus.PREFILLED, SequenceStatus.RESERVED, SequenceStatus.COMMITTED)
        if seq_id is not None:
            self.scheduler.release(seq_id)
            del self.models[seq_id]

    @rule(data=st.data())
    def abort(self, data):
        seq_id = self.pick(data, *(set(SequenceStatus) - {SequenceStatus.ENDED}))
        if seq_id is None:
            return
        held = self.scheduler.block_table(seq_id)
        touched = seq_id in self.pins or any(seq_id in batch.touched for batch in self.in_flight)
        self.scheduler.abort(seq_id)
        del self.models[seq_id]
        if touched:
            assert self.scheduler.block_table(seq_id) == held, "freed while the engine or a transport uses them"
        else:
            assert self.scheduler.status(seq_id) is None

    @rule(data=st.data())
    def pin(self, data):
        seq_id = self.pick(data, *(set(SequenceStatus) - {SequenceStatus.ENDED, SequenceStatus.WAITING, *SWAPPED_OUT}))
        if seq_id is not None:
            self.scheduler.pin(seq_id)
            self.pins[seq_id] = self.pins.get(seq_id, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.unpin_one(data.draw(st.sampled_from(sorted(self.pins))))

    def unpin_one(self, seq_id: int) -> None:
        assert self.scheduler.status(seq_id) is not None, "a pinned sequence was forgotten"
        self.scheduler.unpin(seq_id)
        self.pins[seq_id] -= 1
        if not self.pins[seq_id]:
            del self.pins[seq_id]

    # --- steps ---

    @rule(seconds=st.sampled_from([0.1, 3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(gate_open=st.booleans())
    def schedule(self, gate_open):
        self.schedule_once(gate_open)

    def schedule_once(self, gate_open: bool = True) -> bool:
        """Whether a step was scheduled."""
        rivals = self.with_status(SequenceStatus.DECODING, *SWAPPED_OUT)
        best = min(
            rivals, key=lambda i: (self.models[i].spec.priority, self.models[i].spec.accepted_at, i), default=None
        )
        batch, events = self.scheduler.schedule(self.now, lambda _: gate_open)
        assert Preempted(best or 0) not in events, "the oldest sequence of the best class was preempted"
        self.check_events(events)
        if batch is not None:
            assert sum(len(part.token_ids) for part in batch.scheduled) <= self.config.max_step_tokens
            self.in_flight.append(batch)
        assert len(self.in_flight) <= self.config.max_steps_in_flight
        return batch is not None

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish_step(self, data):
        batch = self.in_flight[0]
        parts = [part.seq_id for part in batch.scheduled]
        may_fail = parts and data.draw(st.integers(0, 5)) == 0
        self.finish_once({data.draw(st.sampled_from(parts)): "not a number"} if may_fail else {})

    @rule(count=st.integers(2, 6))
    def run_several(self, count):
        """Several steps in a row: enough for sequences to outgrow the blocks."""
        self.run_steps(count)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            while self.schedule_once():
                pass
            if self.in_flight:
                self.finish_once({})

    def finish_once(self, failed: dict[int, str]) -> None:
        self.now += 0.5
        expected = {seq_id for seq_id in failed if seq_id in self.models}
        events = self.node.finish(self.in_flight.pop(0), self.now, failed)
        assert {event.seq_id for event in events if isinstance(event, Failed)} == expected
        self.check_events(events)

    @invariant()
    def holds(self):
        if not hasattr(self, "node"):
            return
        self.scheduler.check_invariants()
        load = self.scheduler.load()
        assert load.waiting_requests == len(self.with_status(SequenceStatus.WAITING)) == self.scheduler.num_waiting
        assert load.free_blocks == self.node.pool.num_free
        assert all(self.scheduler.status(seq_id) not in (None, SequenceStatus.ENDED) for seq_id in self.models)

    # --- the end ---

    def teardown(self):
        if not hasattr(self, "node"):
            return
        for seq_id in [seq_id for seq_id, count in self.pins.items() for _ in range(count)]:
            self.unpin_one(seq_id)
        for _ in range(600):
            for seq_id in self.with_status(SequenceStatus.PREFILLED, SequenceStatus.RESERVED, SequenceStatus.COMMITTED):
                self.scheduler.release(seq_id)
                del self.models[seq_id]
            self.schedule_once()
            while self.in_flight:
                self.finish_once({})
            if not self.models:
                break
        assert not self.models, "a sequence never ended"
        assert self.scheduler.is_quiescent()
        assert not self.scheduler.work_waiting
        self.scheduler.check_invariants()
        self.check_runner_forgets()

    def check_runner_forgets(self) -> None:
        """The next batch announces all remaining ends to the runner."""
        last = self.scheduler.add(make_spec([9], max_new_tokens=1), self.now)
        batch = self.node.step(self.now)
        assert batch is not None
        assert set(self.node.runner.known) == {last}
        assert self.scheduler.is_quiescent()


class OverloadMachine(SchedulerMachine):
    """Starts with as many long sequences as may run: they outgrow the blocks unless they are ended earlier."""

    @initialize(
        config=OVERLOAD_CONFIGS,
        num_host_blocks=st.sampled_from([0, 5, 12]),
        load=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=3, max_size=4),
    )
    def start(self, config, num_host_blocks, load):
        self.begin(config, num_host_blocks)
        for number, (priority, length) in enumerate(load):
            prompt = [20 + number] * length
            self.add_one(make_spec(prompt, priority=priority, max_new_tokens=12, ignore_eos=True))
        self.run_steps(5)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=40)
TestOverloadMachine = OverloadMachine.TestCase
TestOverloadMachine.settings = settings(max_examples=120, stateful_step_count=20)
