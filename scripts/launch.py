#!/usr/bin/env python3
"""``odsgd-launch`` from a source checkout, without installing the package."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from odsgd_kvstore.launch.cli import main  # noqa: E402 (needs the path above)

if __name__ == "__main__":
    main()
