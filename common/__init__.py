"""What both roles and the router share. Imports neither of them.

Light modules (errors, ids, clock, config, sampling_params, protocol, state, kv, scheduling, transport, metrics, log)
never import torch; heavy ones (device, models, engine, kv_transfer, node) may.

Modules of this project do nothing at import, with the one exception below. PyTorch loads every installed backend
package while `import torch` runs; with torch-npu installed and CANN not loadable (its environment script not sourced,
a machine without an NPU) `import torch` itself fails then, and not even `kvferry doctor` could say why. The switch
works only before torch is imported anywhere, and this package is imported before any module that does so.
`kvferry.common.device.npu` imports the NPU backend explicitly. A value that the user has set is kept.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
