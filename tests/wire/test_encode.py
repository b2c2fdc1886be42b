"""What may not be sent is refused where it is made, as ProtocolError."""

from array import array

import msgspec
import pytest

from kvferry.common.base.errors import ProtocolError
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import Job, Message, Queued
from kvferry.common.protocol.wire import decode, encode
from tests.wire.samples import KEY, LARGEST_SEED, SAMPLES, envelope

JOB = next(message for message in SAMPLES if isinstance(message, Job))


def with_spec(**changes: object) -> Job:
    return msgspec.structs.replace(JOB, spec=msgspec.structs.replace(JOB.spec, **changes))


def with_seed(seed: int) -> Job:
    return with_spec(sampling=msgspec.structs.replace(JOB.spec.sampling, seed=seed))


@pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**63, LARGEST_SEED])
def test_seeds_keep_every_bit(seed: int):
    back = decode(encode(envelope(with_seed(seed)), Limits()), Limits()).message
    assert isinstance(back, Job)
    assert back.spec.sampling.seed == seed


def test_a_seed_beyond_64_bits_is_refused():
    with pytest.raises(ProtocolError, match="Job: cannot be sent"):
        encode(envelope(with_seed(LARGEST_SEED + 1)), Limits())


def test_a_lone_surrogate_is_refused():
    with pytest.raises(ProtocolError, match="Job: cannot be sent"):
        encode(envelope(with_spec(trace="\ud800")), Limits())


def test_ids_of_another_width_are_refused():
    wide = with_spec(prompt_token_ids=array("Q", [1]))
    with pytest.raises(ProtocolError, match="typecode"):
        encode(envelope(wide), Limits())


def test_a_message_outside_the_protocol_is_refused():
    class Stray(Message, frozen=True, kw_only=True):
        pass

    with pytest.raises(ProtocolError, match="Stray"):
        encode(envelope(Stray()), Limits())

    class Lookalike(Queued, frozen=True, kw_only=True):
        pass

    with pytest.raises(ProtocolError, match="Lookalike"):
        encode(envelope(Lookalike(key=KEY)), Limits())


def test_ids_may_grow_while_their_frames_wait():
    ids = array("I", [1, 2])
    frames = encode(envelope(with_spec(prompt_token_ids=ids)), Limits())
    ids.append(3)
    assert bytes(frames[2]) == array("I", [1, 2]).tobytes()
