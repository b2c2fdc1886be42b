"""What the ZeroMQ library of this machine can do; for `kvferry doctor`. Opens nothing."""

import zmq

_WANTED = ("curve", "ipc")


def zmq_features() -> tuple[bool, str]:
    """(whether all that may be wanted is there, one line about it)."""
    missing = [name for name in _WANTED if not zmq.has(name)]
    text = f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"
    if missing:
        advice = "; no keys: loopback only, or pyzmq's own wheel" if "curve" in missing else ""
        return False, f"{text}, built without {' and '.join(missing)}{advice}"
    return True, f"{text}, with {' and '.join(_WANTED)}: [security] can be used"
