"""Prefix hashes. Their exact bytes must not change, because caches and routers compare them."""

import subprocess
import sys
from array import array

from kvferry.common.kv.hashing import DIGEST_BYTES, chain, chain_bytes, root, token_bytes


def test_the_digest_of_a_known_chain_is_stable():
    first = chain(root("model-a"), array("I", [1, 2, 3, 4]))
    assert first.hex() == "2bf321a07cf3a2cea103eb429154b525"
    assert chain(first, array("I", [5, 6, 7, 8])).hex() == "70fe3e4fd3c76d2868ac343a4856ba9a"


def test_the_chain_depends_on_model_parent_ids_and_order():
    ids = array("I", [1, 2, 3])
    values = {
        chain(root("a"), ids),
        chain(root("b"), ids),
        chain(chain(root("a"), ids), ids),
        chain(root("a"), array("I", [3, 2, 1])),
        chain(root("a"), array("I", [1, 2])),
    }
    assert len(values) == 5
    assert {len(value) for value in values} == {DIGEST_BYTES}


def test_salts_and_adapters_share_no_hash_and_no_boundary_is_ambiguous():
    roots = [root("m"), root("m", "s"), root("m", "", "s"), root("m", "s", "a"), root("ms"), root("m", "sa")]
    assert len(set(roots)) == len(roots)
    assert root("m", "", "") == root("m")


def test_token_bytes_are_little_endian_uint32():
    assert token_bytes(array("I", [1, 0x01020304])) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert chain(root("m"), array("I", [7])) == chain_bytes(root("m"), b"\x07\0\0\0")


def test_a_big_endian_machine_gets_the_same_bytes(monkeypatch):
    there = array("I", [1, 0x01020304])
    there.byteswap()
    before = array("I", there)
    monkeypatch.setattr(sys, "byteorder", "big")
    assert token_bytes(there) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert there == before, "the caller's ids are unchanged"


def test_another_process_with_another_hash_seed_agrees():
    program = (
        "from array import array; from kvferry.common.kv.hashing import *; "
        "print(chain(root('m'), array('I', [1])).hex())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "4242"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == chain(root("m"), array("I", [1])).hex()
