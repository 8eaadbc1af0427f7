"""Batches of one worker from RecordIO files that are too large to decode beforehand."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batches import Batch, DataError, count_steps
from convergence_run import Run

MAGIC = 0xCED7230A
LENGTH_BITS = 29  # of the word after the magic number; above are flags
RESIZE = 256  # shorter edge of a test image before the crop
# The usual augmentation: crops of random area and aspect ratio as in Szegedy et al.,
# Going Deeper with Convolutions, CVPR 2015.
AUGMENTATION = {
    "random_resized_crop": True,
    "min_random_area": 0.08,
    "max_random_area": 1.0,
    "min_aspect_ratio": 3 / 4,
    "max_aspect_ratio": 4 / 3,
    "rand_mirror": True,
}


class StreamBatches:
    """Batches of one worker, read and decoded as they are needed.

    Parameters
    ----------
    run : Run
    rank : int
        Whose batches: each rank reads its own part of the files.
    folder : Path
        With train.rec, train.idx, val.rec and val.idx.
    shape : tuple of int
        Channels, height and width.
    mean, deviation : sequence of float
        One for each channel, of pixels from 0 to 1.

    Raises
    ------
    DataError
        There are too few images, or the partition is not 'iid'.

    Notes
    -----
    Each rank has the same part of the file in all epochs: as many records as others,
    one after the other. So they must be in random order; shuffle them when packing.
    max_train makes an epoch shorter, but the images still come from the whole part.
    """

    def __init__(
        self, run: Run, rank: int, folder: Path, shape: Any, mean: Any, deviation: Any
    ) -> None:
        if run.partition != "iid":
            raise DataError(
                f"partition is {run.partition!r}; {run.dataset} is streamed, and only "
                "'iid' is possible."
            )
        self._run, self._rank, self._folder = run, rank, folder
        num_train = _at_most(len(read_index(folder / "train.idx")), run.max_train)
        self._num_test = _at_most(len(read_index(folder / "val.idx")), run.max_test)
        if self._num_test < run.num_workers:
            raise DataError(
                f"{run.dataset} has {self._num_test} test images for {run.num_workers} "
                "workers: each needs one at least."
            )
        self.steps_per_epoch = count_steps(run, num_train)
        self._settings = {
            "data_shape": shape,
            **{f"mean_{c}": 255 * m for c, m in zip("rgb", mean)},
            **{f"std_{c}": 255 * d for c, d in zip("rgb", deviation)},
            "verbose": False,
        }

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The training batches of an epoch, counted from 0; as many on all ranks."""
        seed = 1000 * self._run.seed + epoch
        settings = {"shuffle": True, "seed": seed, "seed_aug": seed, **AUGMENTATION}
        iterator = self._iterator("train", self._run.num_workers, **settings)
        for _ in range(self.steps_per_epoch):
            try:
                batch = next(iterator)
            except StopIteration:  # this rank's part is a little shorter than others
                iterator.reset()
                batch = next(iterator)
            yield _on_cpu(batch.data[0]), _on_cpu(batch.label[0])

    def test(self) -> Iterator[Batch]:
        """This rank's share of the test images, each once."""
        run = self._run
        settings = {"resize": RESIZE, "round_batch": False}
        left = len(range(self._rank, self._num_test, run.num_workers))
        for batch in self._iterator("val", run.num_workers, **settings):
            count = min(left, run.batch_size - batch.pad)
            if count > 0:
                yield _on_cpu(batch.data[0][:count]), _on_cpu(batch.label[0][:count])
            left -= count

    def fixed(self, count: int) -> Iterator[Any]:
        """The first training images, not augmented, equal on every rank.

        About `count`, in whole batches: one at least.
        """
        iterator = self._iterator("train", 1, resize=RESIZE)
        for _, batch in zip(range(max(1, count // self._run.batch_size)), iterator):
            yield _on_cpu(batch.data[0])

    def _iterator(self, name: str, num_parts: int, **settings: Any) -> Any:
        """Over the rank's part of a file, if there are several."""
        from mxnet import io

        return io.ImageRecordIter(
            path_imgrec=str(self._folder / f"{name}.rec"),
            path_imgidx=str(self._folder / f"{name}.idx"),
            batch_size=self._run.batch_size,
            num_parts=num_parts,
            part_index=self._rank if num_parts > 1 else 0,
            **self._settings,
            **settings,
        )


def _on_cpu(array: Any) -> Any:
    """A copy where the weights are: MXNet's iterators fill pinned memory, again."""
    from mxnet import cpu

    return array.as_in_context(cpu())


def _at_most(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)


def read_index(path: Path) -> list[int]:
    """Where the records begin, from an .idx file: a number and a position a line."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return [int(line.split("\t")[1]) for line in lines]
    except (ValueError, IndexError, OSError) as error:
        raise DataError(
            f"{path} is no index of a RecordIO file: {error}. Make it anew with "
            "MXNet's tools/rec2idx.py."
        ) from error


def check_records(records: Path, index: Path) -> None:
    """Refuse a RecordIO file that its index does not fit, without reading it whole."""
    starts = read_index(index)
    size = records.stat().st_size
    with open(records, "rb") as file:
        for start in (min(starts, default=0), max(starts, default=0)):
            file.seek(start)
            header = file.read(8)
            magic, word = struct.unpack("<II", header.ljust(8, b"\0"))
            if magic != MAGIC:
                raise DataError(
                    f"{records} has no record at byte {start}, where {index.name} says "
                    "so: it is truncated, no RecordIO file, or not of this index."
                )
    if start + 8 + word % (1 << LENGTH_BITS) > size:
        raise DataError(f"{records} is truncated: its last record is not complete.")
