"""Which KV transports a node can use, from its settings. Imports a transport's module on first use; moves no bytes.

The first usable one-sided transport in `node.kv_transports` carries pieces by staging slots. Everything else goes
through ZeroMQ messages.
"""

from importlib import import_module

from kvferry.common.base.errors import InvariantError
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.kv.transports import KV_TRANSPORTS
from kvferry.common.kv_transfer.interface import KvTransport


def load_transport(name: str) -> KvTransport:
    """The transport of a name in KV_TRANSPORTS. Raises InvariantError when its module declares another one."""
    transport: object = import_module(KV_TRANSPORTS[name]).TRANSPORT
    if not isinstance(transport, KvTransport) or transport.name != name:
        raise InvariantError(f"KV transport {name}: {KV_TRANSPORTS[name]} declares {transport}")
    return transport


def usable_transports(settings: NodeSettings) -> tuple[KvTransport, ...]:
    """The configured transports that this node can use, in the configured order: `Welcome.transports`."""
    configured = (load_transport(name) for name in settings.kv_transports)
    return tuple(transport for transport in configured if _is_usable(transport, settings))


def staging_transport(settings: NodeSettings) -> KvTransport | None:
    """The one-sided transport of this node; None: all bytes go in messages."""
    return next((transport for transport in usable_transports(settings) if transport.is_one_sided), None)


def staging_host(settings: NodeSettings) -> str:
    """See `KvTransport.staging_host`; "" without a one-sided transport."""
    transport = staging_transport(settings)
    return "" if transport is None else transport.staging_host()


def num_staging_slots(settings: NodeSettings) -> int:
    """Number of staging slots that this node provides. Only a node that decodes receives KV."""
    receives = settings.role != "prefill" and staging_transport(settings) is not None
    return settings.staging_slots if receives else 0


def _is_usable(transport: KvTransport, settings: NodeSettings) -> bool:
    # The messages between the ranks of a node carry no staging slots.
    reaches_ranks = settings.tensor_parallel == 1 or not transport.is_one_sided
    return reaches_ranks and transport.is_usable(settings)
