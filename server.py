"""The server program of this checkout: `python server.py`. Installed, it is the command `qb-server`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # this checkout's own code, whatever is installed

from qb.server import main

if __name__ == "__main__":
    sys.exit(main())
