"""The KV transports by name. Light: the configuration reads the names without importing any transport.

A new transport is one module in `common.kv_transfer`, with a module-level `TRANSPORT` (a `KvTransport`), and one line
here. `common.kv_transfer.registry` imports the module when a node uses it.
"""

KV_TRANSPORTS: dict[str, str] = {
    "shm": "kvferry.common.kv_transfer.shm",
    "zmq": "kvferry.common.kv_transfer.zmq_backend",
}
"""Name -> module of its TRANSPORT."""

MESSAGE_TRANSPORT = "zmq"
"""Must always be configured: carries Piece and Credit messages, and the bytes that no other transport can carry."""
