"""What the router, the prefill node and the decode node share. Imports none of them.

Light packages (base, config, protocol, cluster, kv, scheduling, transport, tokenizer) never import torch; heavy ones
(device, models, parallel, engine, kv_transfer, ranks, node) may. The import contracts in pyproject.toml enforce both.

Modules of this project have no side effects at import, with one exception: the variable set below. PyTorch loads every
installed backend package during `import torch`. If torch-npu is installed and CANN cannot be loaded (its environment
script is not sourced, or the machine has no NPU), `import torch` fails, and not even `kvferry doctor` could say why.
The variable takes effect only before the first import of torch, and this package is imported before any module that
imports torch. `kvferry.common.device.npu` imports the NPU backend explicitly. A value set by the user is retained.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
