"""What both legs and the router share. Imports neither of them.

Light modules (errors, ids, clock, config, sampling_params, protocol, state, kv, scheduling, transport, metrics, log)
never import torch; heavy ones (device, models, engine, kv_transfer, node) may.
"""
