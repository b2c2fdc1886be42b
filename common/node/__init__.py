"""The one node shell for every role: a control thread that owns the sockets and the core, an engine thread, a KV mover.

control thread   receives, asks the core, performs its actions            shell.py, poll_watcher.py
engine thread    runs one step at a time, never touches a socket          engine_thread.py
KV mover         has its own sockets and thread                           common.kv_transfer
composition      configuration -> device, model, cache, core              build.py
"""
