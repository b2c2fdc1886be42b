"""The bounded queue of messages for one peer."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.transport.nonblocking import Outbox

MESSAGES = st.lists(st.binary(max_size=4), min_size=1, max_size=3)


@given(st.lists(MESSAGES | st.just(None)), st.integers(0, 4), st.integers(0, 16))
def test_it_behaves_like_a_bounded_list(script: list[list[bytes] | None], max_messages: int, max_bytes: int):
    """None in the script pops a message."""
    outbox = Outbox(max_messages, max_bytes)
    model: list[list[bytes]] = []
    for step in script:
        if step is not None:
            fits = len(model) < max_messages and sum(len(b"".join(m)) for m in [*model, step]) <= max_bytes
            assert outbox.put(step) is fits
            model += [step] if fits else []
        elif model:
            assert outbox.first() == model.pop(0)
            outbox.pop()
        outbox.check_invariants()
        assert len(outbox) == len(model)
        assert bool(outbox) is bool(model)
    assert outbox.clear() == len(model)
    outbox.check_invariants()
    assert outbox.num_bytes == 0
