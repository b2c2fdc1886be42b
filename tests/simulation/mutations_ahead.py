"""Seeded defects of steps that are planned ahead of a token still being drawn. See mutations.py."""

from kvferry.common.protocol.messages import FinishReason
from kvferry.common.scheduling.events import SchedulerEvent
from kvferry.common.scheduling.preemption_policy import PreemptionPolicy
from kvferry.common.scheduling.results import Results
from kvferry.common.scheduling.sequence import Sequence
from kvferry.common.scheduling.step import StepResult
from kvferry.common.scheduling.step_builder import StepBuilder
from kvferry.common.scheduling.tokens_in_flight import TokensInFlight
from tests.simulation.mutation import Mutation, Patched


def _free_at_the_end(right: Patched) -> Patched:
    def tell_token(self: Results, seq: Sequence, reason: FinishReason | None, events: list[SchedulerEvent]) -> object:
        goes_on = right(self, seq, reason, events)
        if not goes_on and seq.steps_in_flight:
            self._pool.release(seq.seq_id)
        return goes_on

    return tell_token


def _overlook_the_end(right: Patched) -> Patched:
    def finish_reason(self: Sequence, eos_token_ids: frozenset[int]) -> object:
        return None if self.tokens_in_flight else right(self, eos_token_ids)

    return finish_reason


def _past_the_length(_: Patched) -> object:
    return property(lambda self: self.tokens_in_flight == 1)


def _while_short(right: Patched) -> Patched:
    return lambda self: right(self) or True


def _drawn_before(_: Patched) -> Patched:
    def note(self: TokensInFlight, result: StepResult) -> None:
        for seq_id, token in result.sampled.items():
            self._last.setdefault(seq_id, token)

    return note


def _twice_the_same(right: Patched) -> Patched:
    def add_ahead(self: StepBuilder, seq: Sequence) -> None:
        seq.num_scheduled_tokens -= 1
        right(self, seq)

    return add_ahead


AHEAD_MUTATIONS: tuple[Mutation, ...] = (
    Mutation("blocks are freed while a step ahead writes them", "5", Results, "_emit_token", _free_at_the_end),
    Mutation("an end is overlooked when a step is ahead of it", "31", Sequence, "finish_reason", _overlook_the_end),
    Mutation("a step is planned ahead past the last token", "31", Sequence, "may_schedule_ahead", _past_the_length),
    Mutation("a step ahead computes a token drawn long before", "32", TokensInFlight, "note", _drawn_before),
    Mutation("a step ahead writes where the one before writes", "32", StepBuilder, "add_ahead", _twice_the_same),
    Mutation(
        "a step is planned ahead while blocks are short", "36", PreemptionPolicy, "allocate_ahead", _while_short, "swap"
    ),
)
