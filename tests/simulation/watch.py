"""Looks at every event and action of every process: rules that no single core can check, and counts of it all."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.ids import Incarnation, RequestId
from common.protocol.messages import Committed, Gone, HandedOver, HandoverFailed, Job, Message, Refused
from common.state.actions import Send
from ops.simulate.process import Process
from tests.simulation.checks import Violation


@dataclass(slots=True)
class Watch:
    """`look` is every process's trace."""

    also: Callable[[Process, object], None] | None = None
    """Another trace to be called first."""
    counts: Counter[str] = field(default_factory=Counter)
    _owners: dict[tuple[RequestId, int], Incarnation] = field(default_factory=dict)

    def look(self, process: Process, what: object) -> None:
        """Called before an event is taken in and before an action is performed."""
        if self.also is not None:
            self.also(process, what)
        if isinstance(what, Send):
            self._sent(process, what.message)

    def _sent(self, process: Process, message: Message) -> None:
        match message:
            case Committed(key=key):
                owner = self._owners.setdefault((key.request_id, key.attempt), key.decode)
                if owner != key.decode:
                    raise Violation(
                        f"attempt {key.attempt} of {key.request_id[:8]} is owned by {process.host} "
                        f"and was by another decode node before"
                    )
            case Job(attempt=attempt):
                self.counts["Job again" if attempt > 1 else "Job"] += 1
            case HandoverFailed(reason=reason, commit_sent=commit_sent):
                self.counts[f"HandoverFailed {reason}{' after Commit' if commit_sent else ''}"] += 1
            case Gone(reason=reason, detail=detail):
                self.counts[f"Gone {reason} {detail[:30]}"] += 1
            case Refused(reason=reason):
                self.counts[f"Refused {reason[:30]}"] += 1
            case HandedOver():
                self.counts["HandedOver"] += 1
