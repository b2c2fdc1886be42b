"""The node process of every role: a control thread that owns the sockets and the core, an engine thread, a KV mover.

- `process`: loads the model, runs the node until it is drained or stopped. `control_thread`: its thread and signals.
- `shell`: the control thread: receives, asks the core, performs its actions. `message_log` logs its messages.
- `build`: composition: settings -> KV cache, scheduler, engine, KV mover, core. `identity`: what a node says of itself.
- `memory`, `graphs`: how much memory weights, KV and recorded steps take.

The engine thread is in `common.engine.engine_thread`, the KV mover with its own thread in `common.kv_transfer`.
"""
