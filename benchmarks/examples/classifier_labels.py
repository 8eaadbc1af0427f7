"""What the loss compares scores with: classes, or shares of classes.

Label smoothing gives a little of each image to every class; mixup (H. Zhang et al.,
mixup: Beyond Empirical Risk Minimization, ICLR 2018) blends each image of a batch, and
its label, with another.
"""

from __future__ import annotations

import argparse

import mxnet as mx
import numpy as np
from classifier_data import derived_seed

_SMOOTHED = 0.1


class Targets:
    """Makes the images and labels that an epoch trains on.

    Parameters
    ----------
    args : argparse.Namespace
        num_classes, dtype, label_smoothing, mixup, mixup_alpha, mixup_off_epoch,
        num_epochs and seed.
    epoch, rank : int
        They decide, with the seed, how much is mixed.

    Attributes
    ----------
    are_shares : bool
        Whether labels become (batch, classes); else they stay (batch,).
    """

    def __init__(self, args: argparse.Namespace, epoch: int, rank: int) -> None:
        self.are_shares = args.mixup or args.label_smoothing
        self._num_classes, self._dtype = args.num_classes, args.dtype
        self._smoothed = _SMOOTHED if args.label_smoothing else 0.0
        is_last = epoch >= args.num_epochs - args.mixup_off_epoch
        self._alpha = args.mixup_alpha if args.mixup and not is_last else 0.0
        self._random = np.random.RandomState(
            derived_seed("mixup", args.seed, epoch, rank)
        )

    def __call__(
        self, images: list[mx.nd.NDArray], labels: list[mx.nd.NDArray]
    ) -> tuple[list[mx.nd.NDArray], list[mx.nd.NDArray]]:
        """Images and labels by device, as the loss takes them; new arrays if changed."""
        if not self.are_shares:
            return images, labels
        shares = [self._shares(label) for label in labels]
        if not self._alpha:
            return images, shares
        part = self._random.beta(self._alpha, self._alpha)
        return _blend(images, part), _blend(shares, part)

    def _shares(self, labels: mx.nd.NDArray) -> mx.nd.NDArray:
        rest = self._smoothed / self._num_classes
        return mx.nd.one_hot(
            labels,
            self._num_classes,
            on_value=1 - self._smoothed + rest,
            off_value=rest,
            dtype=self._dtype,
        )


def _blend(arrays: list[mx.nd.NDArray], part: float) -> list[mx.nd.NDArray]:
    """Each row with the one as far from the other end."""
    return [part * x + (1 - part) * x.flip(axis=0) for x in arrays]
