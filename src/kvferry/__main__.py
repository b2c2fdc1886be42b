"""`python -m kvferry`: the same as the command `kvferry`."""

import sys

from kvferry.ops.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
