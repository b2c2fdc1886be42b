"""The garbage collector skips objects that were loaded before the process serves."""

import gc

from kvferry.common.base.gc_freeze import freeze_loaded_objects


def test_frozen_objects_are_not_tracked():
    loaded = [[number] for number in range(1000)]
    assert any(seen is loaded for seen in gc.get_objects())
    freeze_loaded_objects()
    try:
        assert gc.get_freeze_count() > len(loaded)
        assert not any(seen is loaded for seen in gc.get_objects())
    finally:
        gc.unfreeze()
