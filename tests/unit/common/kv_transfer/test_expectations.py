"""Which pieces may be written, and that nothing is after `forget`."""

import threading
import zlib

import msgspec
import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation
from kvferry.common.kv_transfer import expectations as module
from kvferry.common.kv_transfer.expectations import Expectations, Verdict
from kvferry.common.protocol.messages import Piece
from kvferry.common.protocol.wire import Frame
from tests.support.kv_memory import MemoryCache, key_between, piece_of
from tests.support.transport import DEADLINE_S

PREFILL, DECODE = Incarnation("a1" * 16), Incarnation("b2" * 16)
KEY, OTHER = key_between(PREFILL, DECODE, 1), key_between(PREFILL, DECODE, 2)
TABLE = (5, 2)


@pytest.fixture
def cache() -> MemoryCache:
    return MemoryCache()


def data_for(piece: Piece) -> bytes:
    return bytes(range(1, 256)) * (piece.num_bytes // 255 + 1)


def write(expectations: Expectations, piece: Piece) -> tuple[Verdict, str]:
    return expectations.write(piece, data_for(piece)[: piece.num_bytes])


def test_an_expected_piece_lands_in_its_blocks(cache: MemoryCache):
    expectations = Expectations(cache)
    expectations.expect(KEY, TABLE, 0)
    piece = piece_of(cache, KEY, layers=(1, 3), tokens=(2, 6))
    assert write(expectations, piece) == (Verdict.WRITTEN, "")
    assert bytes(cache.read(1, 3, TABLE, 2, 6)) == data_for(piece)[: piece.num_bytes]
    cache.bytes[1:3, cache.rows(TABLE, 2, 6)] = 0
    assert not cache.bytes.any()


def test_what_nobody_expects_touches_nothing(cache: MemoryCache):
    expectations = Expectations(cache)
    expectations.expect(KEY, TABLE, 0)
    assert write(expectations, piece_of(cache, OTHER, layers=(0, 1), tokens=(0, 1))) == (Verdict.UNKNOWN, "")
    expectations.forget(KEY)
    expectations.forget(KEY)
    expectations.forget(OTHER)
    assert write(expectations, piece_of(cache, KEY, layers=(0, 1), tokens=(0, 1))) == (Verdict.UNKNOWN, "")
    assert not cache.bytes.any()
    assert len(expectations) == 0


@pytest.mark.rule(23)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_bytes": 63}, "64 bytes came, 63 were announced"),
        ({"checksum": 1}, "checksum"),
        ({"token_start": 2, "token_end": 4}, "below 4, the first one asked for"),
        ({"token_start": -1}, "below 4"),
        ({"number": -1}, "number -1"),
        ({"token_start": 8, "token_end": 10}, "tokens 8 to 10"),
        ({"token_start": 4, "token_end": 2**62}, "tokens 4 to"),
        ({"token_end": 4}, "tokens 4 to 4"),
        ({"layer_start": 3, "layer_end": 7}, "layers 3 to 7"),
        ({"layer_start": -1}, "layers -1 to"),
    ],
)
def test_a_bad_piece_writes_nothing(cache: MemoryCache, change: dict[str, int], why: str):
    expectations = Expectations(cache)
    expectations.expect(KEY, TABLE, 4)
    right = piece_of(cache, KEY, layers=(0, 4), tokens=(4, 6))
    verdict, text = expectations.write(msgspec.structs.replace(right, **change), data_for(right)[: right.num_bytes])
    assert verdict is Verdict.BAD
    assert why in text
    assert not cache.bytes.any()
    assert write(expectations, right)[0] is Verdict.WRITTEN


def test_a_right_checksum_is_accepted(cache: MemoryCache):
    expectations = Expectations(cache)
    expectations.expect(KEY, TABLE, 0)
    piece = piece_of(cache, KEY, layers=(0, 1), tokens=(0, 1))
    crc = zlib.crc32(data_for(piece)[: piece.num_bytes])
    assert write(expectations, msgspec.structs.replace(piece, checksum=crc))[0] is Verdict.WRITTEN


def test_a_key_is_expected_once(cache: MemoryCache):
    expectations = Expectations(cache)
    expectations.expect(KEY, TABLE, 0)
    with pytest.raises(InvariantError):
        expectations.expect(KEY, TABLE, 0)


@pytest.mark.rule(26)
def test_forget_waits_for_the_write_under_way_and_lets_no_later_one_through(cache: MemoryCache):
    expectations = Expectations(cache)
    expectations.expect(KEY, TABLE, 0)
    in_write, go_on, forgotten = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        in_write.set()
        assert go_on.wait(DEADLINE_S)
        assert not forgotten.is_set()

    cache.before_write = hold
    piece = piece_of(cache, KEY, layers=(0, 1), tokens=(0, 1))
    verdicts: list[Verdict] = []
    writer = threading.Thread(target=lambda: verdicts.append(write(expectations, piece)[0]))

    def forget() -> None:
        expectations.forget(KEY)
        forgotten.set()

    forgetter = threading.Thread(target=forget)
    writer.start()
    assert in_write.wait(DEADLINE_S)
    forgetter.start()
    # Another key's expectation is not held up by this write.
    expectations.expect(OTHER, TABLE, 0)
    expectations.forget(OTHER)
    go_on.set()
    writer.join()
    forgetter.join()
    assert verdicts == [Verdict.WRITTEN]
    assert write(expectations, piece)[0] is Verdict.UNKNOWN
    assert cache.writes == 1


@pytest.mark.rule(26)
def test_a_write_that_has_found_its_key_before_forget_writes_nothing_after_it(
    cache: MemoryCache, monkeypatch: pytest.MonkeyPatch
):
    """The moment between finding the key and taking its lock, which threads alone meet once in a long while."""
    expectations = Expectations(cache)
    expectations.expect(KEY, TABLE, 0)
    check = module._fault

    def forget_meanwhile(piece: Piece, data: Frame, first_token: int) -> str:
        expectations.forget(KEY)
        return check(piece, data, first_token)

    monkeypatch.setattr(module, "_fault", forget_meanwhile)
    assert write(expectations, piece_of(cache, KEY, layers=(0, 1), tokens=(0, 1)))[0] is Verdict.UNKNOWN
    assert cache.writes == 0


def test_no_write_follows_forget_whatever_the_threads_do(cache: MemoryCache):
    """A writer that never stops, against many rounds of expect and forget."""
    expectations = Expectations(cache)
    piece = piece_of(cache, KEY, layers=(0, 1), tokens=(0, 1))
    stop = threading.Event()
    written = [0]

    def flood() -> None:
        while not stop.is_set():
            written[0] += write(expectations, piece)[0] is Verdict.WRITTEN

    writer = threading.Thread(target=flood)
    writer.start()
    rounds = 0
    while rounds < 300 or not written[0]:
        rounds += 1
        expectations.expect(KEY, TABLE, 0)
        expectations.forget(KEY)
        before = cache.writes
        assert write(expectations, piece)[0] is Verdict.UNKNOWN
        assert cache.writes == before
    stop.set()
    writer.join()
    assert cache.writes == written[0]
