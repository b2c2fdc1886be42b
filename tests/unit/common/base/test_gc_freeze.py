"""What was loaded before a process serves is no work for the collector any more."""

import gc

from kvferry.common.base.gc_freeze import keep_what_is_loaded


def test_no_collection_looks_at_what_was_loaded():
    loaded = [[number] for number in range(1000)]
    assert any(seen is loaded for seen in gc.get_objects())
    keep_what_is_loaded()
    try:
        assert gc.get_freeze_count() > len(loaded)
        assert not any(seen is loaded for seen in gc.get_objects())
    finally:
        gc.unfreeze()
