"""numpy, for work on columns of numbers; None where it is not installed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
else:
    try:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread for each processor
        import numpy as np
    except ImportError:
        np = None

__all__ = ["np"]
