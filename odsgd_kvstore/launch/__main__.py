"""``python -m odsgd_kvstore.launch``: the same as ``odsgd-launch``."""

from odsgd_kvstore.launch.cli import main

if __name__ == "__main__":
    main()
