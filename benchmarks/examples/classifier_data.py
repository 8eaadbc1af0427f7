"""Batches of images from RecordIO: as many on every rank, in an order by seed.

A rank reads one part of the file, the same in each epoch, as MXNet's iterator cuts it.
Order and augmentation are drawn anew in each epoch, from (seed, epoch, rank) alone, so
that a training that goes on after a stop sees the same batches.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
from typing import Iterator

import mxnet as mx
import numpy as np
from classifier_flags import Refused

# Of ImageNet's pixels, 0 to 255; eigenvectors for the colour noise are MXNet's own.
NORMALISED = {
    "mean_r": 123.68,
    "mean_g": 116.779,
    "mean_b": 103.939,
    "std_r": 58.393,
    "std_g": 57.12,
    "std_b": 57.375,
}
AUGMENTED = {
    "rand_mirror": True,
    "random_resized_crop": True,
    "min_random_area": 0.08,
    "max_random_area": 1.0,
    "min_aspect_ratio": 3 / 4,
    "max_aspect_ratio": 4 / 3,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "pca_noise": 0.1,
}
_SEEDS = 2**28  # MXNet adds numbers to a seed and keeps it in 32 bits


def count_records(index: str) -> int:
    """How many records an .idx file lists.

    Raises
    ------
    Refused
        None, or a line is not a number and a position.
    """
    count = 0
    with open(index, encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            words = line.split()
            if len(words) != 2 or not all(word.isdigit() for word in words):
                raise Refused(
                    f"{index} is not an index of a RecordIO file: line {count + 1} is "
                    f"{line.strip()[:40]!r}. Make it with MXNet's tools/rec2idx.py."
                )
            count += 1
    if count == 0:
        raise Refused(f"{index} lists no records. Make it with tools/rec2idx.py.")
    return count


def count_batches(num_records: int, num_workers: int, batch_size: int) -> int:
    """Full batches that every rank has in an epoch.

    Parameters
    ----------
    num_records : int
        In the whole file. MXNet gives each rank num_records / num_workers, rounded up,
        and the last one what remains.
    num_workers, batch_size : int
        batch_size is that of one worker's step.

    Raises
    ------
    Refused
        Not one.
    """
    largest = math.ceil(num_records / num_workers)
    smallest = num_records - largest * (num_workers - 1)
    if smallest < batch_size:
        raise Refused(
            f"A step of one worker takes {batch_size} images (--batch-size times "
            f"devices), and the share of one of {num_workers} workers is "
            f"{max(smallest, 0)} of the {num_records} images. Give a smaller "
            "--batch-size, fewer workers or more images."
        )
    return smallest // batch_size


def training_batches(
    args: argparse.Namespace,
    epoch: int,
    rank: int,
    num_workers: int,
    batch_size: int,
    num_batches: int,
) -> Iterator[tuple[mx.nd.NDArray, mx.nd.NDArray]]:
    """A rank's batches of an epoch, augmented.

    Yields
    ------
    tuple of NDArray
        Images (batch_size, 3, size, size), normalised, and labels (batch_size,); both
        float32, on the CPU, and overwritten some batches later.

    Raises
    ------
    Refused
        A label is not a class.
    """
    batches = mx.io.ImageRecordIter(
        path_imgrec=args.rec_train,
        path_imgidx=args.rec_train_idx,
        data_shape=(3, args.input_size, args.input_size),
        batch_size=batch_size,
        preprocess_threads=args.num_data_workers,
        num_parts=num_workers,
        part_index=rank,
        shuffle=True,
        seed=derived_seed("order", args.seed, epoch, rank),
        seed_aug=derived_seed("augmentation", args.seed, epoch, rank),
        verbose=False,
        **NORMALISED,
        **AUGMENTED,
    )
    for batch in itertools.islice(batches, num_batches):
        _check_labels(batch.label[0].asnumpy(), args.num_classes)
        yield batch.data[0], batch.label[0]


def validation_batches(
    args: argparse.Namespace, batch_size: int, num_records: int
) -> Iterator[tuple[mx.nd.NDArray, mx.nd.NDArray]]:
    """All validation images, once each: resized, cropped in the middle."""
    batches = mx.io.ImageRecordIter(
        path_imgrec=args.rec_val,
        path_imgidx=args.rec_val_idx,
        data_shape=(3, args.input_size, args.input_size),
        resize=math.ceil(args.input_size / args.crop_ratio),
        batch_size=min(batch_size, num_records),
        preprocess_threads=args.num_data_workers,
        shuffle=False,
        verbose=False,
        **NORMALISED,
    )
    for batch in batches:
        data, label = batch.data[0], batch.label[0]
        _check_labels(label.asnumpy(), args.num_classes)
        real = data.shape[0] - batch.pad  # the rest fills the last batch up
        yield data[:real], label[:real]


def derived_seed(*parts: object) -> int:
    """A seed that differs in every way from that of other `parts`."""
    text = " ".join(map(str, parts))
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % _SEEDS


def _check_labels(labels: np.ndarray, num_classes: int) -> None:
    # MXNet's loss takes any label for the nearest class.
    if labels.min() < 0 or labels.max() >= num_classes:
        wrong = labels[(labels < 0) | (labels >= num_classes)][0]
        raise Refused(
            f"A record has the label {wrong:g}; with --num-classes {num_classes} labels "
            f"are 0 to {num_classes - 1}. Give the number of classes of your images."
        )
