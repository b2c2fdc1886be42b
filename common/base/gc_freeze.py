"""What stays as long as its process: kept out of the garbage collector's sight. For processes, once they are ready."""

import gc


def keep_what_is_loaded() -> None:
    """No later collection looks at what is there now: with torch some 190,000 objects.

    Looking at them all takes 0.1 s, in which no thread runs Python; it would happen now and then while a node serves,
    and several times while its interpreter ends.
    """
    gc.collect()
    gc.freeze()
