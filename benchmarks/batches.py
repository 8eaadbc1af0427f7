"""Which samples a worker's batches hold, in which order: a function of the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Tuple

import numpy as np
from convergence_run import Run

PARTITIONS = ("iid", "classes")
TEST_BATCH = 1000
BLOCK_NUMBERS = 1 << 20
Batch = Tuple[Any, Any]  # NDArrays: images (n, channels, height, width), labels (n,)


class DataError(ValueError):
    """The data are not there, are damaged, or do not suffice for a run."""


def count_steps(run: Run, num_train: int) -> int:
    """Steps of an epoch, equal on all ranks; what remains of the samples is dropped."""
    count = num_train // (run.batch_size * run.num_workers)
    if count == 0:
        limit = "" if run.max_train is None else f" (max_train={run.max_train})"
        raise DataError(
            f"{run.dataset} has {num_train} training images{limit}; {run.num_workers} "
            f"workers with batches of {run.batch_size} need "
            f"{run.batch_size * run.num_workers} at least. Take smaller batches, fewer "
            "workers or more images."
        )
    return count


class ArrayBatches:
    """Batches of one worker from arrays, which may be memory-mapped files.

    Parameters
    ----------
    run : Run
    rank : int
        Whose batches.
    train, test : pair of numpy.ndarray
        Images, uint8 (n, channels, height, width), and labels (n,).
    mean, deviation : sequence of float
        One for each channel, of pixels from 0 to `white`.
    white : int
        The largest pixel.
    flips : bool
        Whether half of the training images are mirrored.

    Raises
    ------
    DataError
        Not enough images for one batch on each worker.
    """

    def __init__(
        self, run: Run, rank: int, train, test, *, mean, deviation, white, flips
    ) -> None:
        self._run, self._rank = run, rank
        self._images, self._labels = (a[: run.max_train] for a in train)
        self._test = [a[: run.max_test][rank :: run.num_workers] for a in test]
        self._scale = _by_channel(1 / (white * np.asarray(deviation)))
        self._shift = _by_channel(-np.asarray(mean) / deviation)
        self._flips, self._test_batches = flips, []
        self.steps_per_epoch = count_steps(run, len(self._labels))
        if run.partition not in PARTITIONS:
            raise DataError(
                f"partition is {run.partition!r}; allowed are 'iid' and 'classes'."
            )

    def indices(self, epoch: int) -> np.ndarray:
        """Numbers of the samples of this rank's batches, (steps, batch size)."""
        run, count = self._run, self.steps_per_epoch
        shape = (count, run.num_workers, run.batch_size)
        if run.partition == "iid":
            order = _random(run, epoch).permutation(len(self._labels))
            return order[: np.prod(shape)].reshape(shape)[:, self._rank]
        size = len(self._labels) // run.num_workers
        shard = self._by_class()[self._rank * size : (self._rank + 1) * size]
        order = _random(run, epoch, 1 + self._rank).permutation(shard)
        return order[: count * run.batch_size].reshape(count, run.batch_size)

    def _by_class(self) -> np.ndarray:
        """All samples, class after class, in random order within each."""
        order = np.random.RandomState(self._run.seed).permutation(len(self._labels))
        return order[np.argsort(self._labels[order], kind="stable")]

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The training batches of an epoch, counted from 0.

        Several are handed to MXNet at once: an array takes its values only when
        MXNet has done all it can do, which would hold up the host at each batch.
        """
        indices, mirrored = self.indices(epoch), self.mirrored(epoch)
        numbers = self._run.batch_size * self._images[0].size
        count = max(1, BLOCK_NUMBERS // numbers)
        for start in range(0, len(indices), count):
            index = indices[start : start + count]
            images = self._images[index]
            if mirrored is not None:
                chosen = mirrored[index]
                images[chosen] = images[chosen, ..., ::-1]
            yield from zip(*self._batch(images, self._labels[index]))

    def mirrored(self, epoch: int) -> np.ndarray | None:
        """Which samples are mirrored in an epoch, whoever gets them; None: never."""
        if not self._flips:
            return None
        return _random(self._run, epoch, 0).rand(len(self._labels)) < 0.5

    def test(self) -> list[Batch]:
        """This rank's share of the test images, in large batches."""
        images, labels = self._test
        if not self._test_batches:
            parts = [
                slice(start, start + TEST_BATCH)
                for start in range(0, len(labels), TEST_BATCH)
            ]
            self._test_batches = [self._batch(images[p], labels[p]) for p in parts]
        return self._test_batches

    def fixed(self, count: int) -> Iterator[Any]:
        """The first training images, not mirrored, equal on every rank.

        About `count`, in whole batches: one at least.
        """
        size = self._run.batch_size
        end = min(max(count, size), len(self._labels))
        for start in range(0, end - size + 1, size):
            part = slice(start, start + size)
            yield self._batch(self._images[part], self._labels[part])[0]

    def _batch(self, images: np.ndarray, labels: np.ndarray) -> Batch:
        """Normalised, float32, as NDArrays."""
        from mxnet import nd

        normal = images * self._scale
        normal += self._shift
        return nd.array(normal), nd.array(labels, dtype="float32")


def _by_channel(values: np.ndarray) -> np.ndarray:
    return np.reshape(values, (-1, 1, 1)).astype("float32")


def _random(run: Run, epoch: int, *what: int) -> np.random.RandomState:
    """A generator for one epoch of a run, the same with every method."""
    return np.random.RandomState([run.seed, epoch, *what])
