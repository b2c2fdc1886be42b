"""`python -m kvferry`: the same as the command `kvferry`.

`python -m` puts the current folder first on `sys.path`, where a user's `queue.py` would replace the standard library's;
the command `kvferry` does not have it there. It is removed before anything else is imported.
"""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from kvferry.ops.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
