"""Train an image classification network on ImageNet-like RecordIO files.

Any network of GluonCV (or, without GluonCV, of MXNet's own zoo), with the flags of
GluonCV's own script; on one worker, or on a cluster with dist_odsgd or dist_sync::

    odsgd-launch -n 4 -s 4 -- python -m odsgd_kvstore \\
        benchmarks/examples/train_classifier.py --kvstore dist_odsgd \\
        --model resnet50_v1b --rec-train train.rec --rec-val val.rec \\
        --batch-size 64 --lr 0.1 --lr-mode cosine --num-epochs 90 \\
        --warmup-epochs 5 --resume auto

`--help` says what the learning rate means and what a checkpoint holds. To read the
code, go on with `classifier_training.py`.
"""

from __future__ import annotations

import sys
from typing import Sequence

from classifier_flags import Refused, parse

# Before MXNet, by its package: a server's process serves here, and does not return.
from odsgd_kvstore.errors import ConfigError, NotSupportedYet
from odsgd_kvstore.process_exit import end_now, install


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says; a refusal ends the process with status 2."""
    install()  # MXNet's stores would make a failed worker wait for the others
    try:
        args = parse(argv)
        from classifier_training import Training

        Training(args).run()
    except (Refused, ConfigError, NotSupportedYet) as refusal:
        print(f"train_classifier: {refusal}", file=sys.stderr)
        end_now(2)


if __name__ == "__main__":
    main()
