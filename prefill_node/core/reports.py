"""What the prefill leg tells workers of their jobs. Pure: makes messages, changes nothing."""

import msgspec

from kvferry.common.ids import Incarnation
from kvferry.common.protocol.messages import Gone, HandedOver, HandoverFailed, Job
from kvferry.common.state.actions import Action, Send
from kvferry.prefill_node.core.job import JobState, PrefillJob


def failed(job: Job, reason: str, *, detail: str = "", retryable: bool = True) -> HandoverFailed:
    """This attempt goes no further here."""
    return HandoverFailed(
        request_id=job.request_id, attempt=job.attempt, reason=reason, detail=detail, retryable=retryable
    )


def failed_with(job: PrefillJob, message: HandoverFailed, *, held: bool, commit_sent: bool) -> HandoverFailed:
    """The same, with what became of its hand-over."""
    key = job.sender.key if job.sender is not None else None
    decode = key.decode if key is not None else None
    return msgspec.structs.replace(message, held=held, commit_sent=commit_sent, decode=decode)


def handed_over(job: PrefillJob) -> Send:
    """A decode node owns it."""
    assert job.sender is not None
    assert job.sender.key is not None
    return Send(job.worker, handed_over_to(job.job, job.sender.key.decode))


def handed_over_to(job: Job, decode: Incarnation) -> HandedOver:
    """The news that this node owns it."""
    return HandedOver(request_id=job.request_id, attempt=job.attempt, decode=decode)


def given_back(job: PrefillJob) -> Send:
    """It is to be planned again elsewhere, at no cost."""
    return Send(job.worker, Gone(request_id=job.job.request_id, attempt=job.job.attempt, reason="given_back"))


def state(job: PrefillJob, next_index: int, resend: bool) -> list[Action]:
    """The answer to a worker's list that expects it: its end, or tokens that the worker lacks."""
    if job.state is JobState.HANDED:
        return [handed_over(job)]
    if job.state is JobState.FAILED and job.failure is not None:
        return [Send(job.worker, job.failure)]
    if job.state is JobState.GIVEN_BACK:
        return [given_back(job)]
    missed = job.first_token is not None and job.first_token.index >= next_index
    if missed and (resend or job.state is JobState.FINISHED):
        assert job.first_token is not None
        return [Send(job.worker, job.first_token)]
    return []
