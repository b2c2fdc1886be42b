"""Sends tokens to workers: one message per step and worker. Pure.

Protocol rule 30: an engine never waits for a worker. The tokens themselves are in each entry's own list.
"""

from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import Action, Send
from kvferry.common.cluster.clients import ClientTable
from kvferry.common.protocol.messages import Tokens, TokensEntry
from kvferry.decode_node.entries import Entry


@dataclass(slots=True)
class TokenOutbox:
    """Tokens gathered between two flushes, by worker."""

    _waiting: dict[Incarnation, list[TokensEntry]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def add_token(self, entry: Entry, token_id: int, index: int) -> None:
        """A token was sampled, or came with the Commit. Raises InvariantError if it does not continue the entry's
        list."""
        known = entry.output_token_ids
        if index == len(known):
            known.append(token_id)
        elif not (index < len(known) and known[index] == token_id):
            raise InvariantError(f"{entry.key}: token {index} does not continue what is known")
        said = TokensEntry(
            request_id=entry.key.request_id,
            attempt=entry.key.attempt,
            first_index=index,
            token_ids=(token_id,),
            cached_tokens=entry.cached_tokens,
        )
        self._waiting.setdefault(entry.worker, []).append(said)

    def add_from(self, entry: Entry, first_index: int) -> None:
        """Send all tokens from this output index on, and the end if there was one."""
        self._waiting.setdefault(entry.worker, []).append(_from(entry, first_index))

    def mark_end(self, entry: Entry) -> None:
        """Attach the end to the last token if that still waits here; otherwise send it alone."""
        waiting = self._waiting.setdefault(entry.worker, [])
        index = len(entry.output_token_ids) - 1
        for place, said in enumerate(waiting):
            if said.request_id == entry.key.request_id and said.first_index == index and entry.error is None:
                waiting[place] = _from(entry, index)
                return
        waiting.append(_from(entry, len(entry.output_token_ids)))

    def forget(self, worker: Incarnation) -> None:
        self._waiting.pop(worker, None)

    def flush(self, clients: ClientTable) -> list[Action]:
        """One message for each worker with new tokens."""
        actions: list[Action] = []
        for worker, said in self._waiting.items():
            client = clients.get(worker)
            if client is not None and said:
                client.link_seq += 1
                actions.append(Send(worker, Tokens(link_seq=client.link_seq, entries=tuple(said))))
        self._waiting.clear()
        return actions


def _from(entry: Entry, first_index: int) -> TokensEntry:
    return TokensEntry(
        request_id=entry.key.request_id,
        attempt=entry.key.attempt,
        first_index=first_index,
        token_ids=tuple(entry.output_token_ids[first_index:]),
        finish=entry.finish,
        error=entry.error,
        cached_tokens=entry.cached_tokens,
    )
