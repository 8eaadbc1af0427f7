"""The data sets of benchmark_convergence.py: found, checked, decoded once, opened."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Tuple

import numpy as np
from batches import ArrayBatches, DataError
from convergence_run import Run
from image_stream import StreamBatches, check_records

Arrays = Tuple[np.ndarray, np.ndarray]  # images (n, channels, height, width), labels
NAMES = ("train_images", "train_labels", "test_images", "test_labels")
CACHE = "cache"  # of decoded data, inside the results' folder
DIGEST = "digest"  # a file beside the arrays
CACHE_FORMAT = 1  # a part of the cache's keys: higher when what is written changes
IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
DIGITS_SEED = 2  # of the split, equal for all runs


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What a data set is.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of an image.
    num_classes : int
    files : tuple of str
        Names in its folder; none for a packaged one.
    read : callable, optional
        Takes the paths, returns training and test arrays; None: streamed.
    mean, deviation : tuple of float
        Of each channel, for pixels from 0 to 1.
    white : int
        The largest pixel.
    flips : bool
        Whether training images are mirrored at random.
    """

    shape: tuple[int, int, int]
    num_classes: int
    files: tuple[str, ...]
    read: Callable[[list[Path]], tuple[Arrays, Arrays]] | None
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    white: int = 255
    flips: bool = False


def prepare(name: str, data: Path | None, cache: Path) -> Path:
    """Check a data set's files and decode them, unless that was done before.

    Parameters
    ----------
    name : str
        One of `DATASETS`.
    data : Path, optional
        Folder with its files; None for the packaged digits.
    cache : Path
        Folder for what is decoded. Several programs may use it at once.

    Returns
    -------
    Path
        The folder to give to `open_dataset`.

    Raises
    ------
    DataError
    """
    dataset = find(name)
    paths = _find_files(name, dataset, data)
    if dataset.read is None:
        for records, index in zip(paths[::2], paths[1::2]):
            check_records(records, index)
        return data
    folder = cache / f"{name}-{_key(paths)}"
    if not folder.is_dir():
        _store(dataset.read(paths), folder)
    return folder


def digest(folder: Path) -> str:
    """What data a folder has: equal for equal data, wherever they are.

    Parameters
    ----------
    folder : Path
        From `prepare`. The digest of decoded data is kept in it.

    Returns
    -------
    str
        SHA-256 of the decoded arrays, or, of data that are streamed, of the indices
        and of the records' sizes.
    """
    if not (folder / f"{NAMES[0]}.npy").is_file():
        return _digest_of_stream(folder)
    kept = folder / DIGEST
    if not kept.is_file():
        found = hashlib.sha256()
        for name in NAMES:
            array = np.load(folder / f"{name}.npy", mmap_mode="r")
            found.update(f"{name} {array.dtype} {array.shape} ".encode())
            found.update(np.ascontiguousarray(array))
        partial = folder / f".{DIGEST}-{os.getpid()}"
        partial.write_text(found.hexdigest() + "\n", encoding="ascii")
        os.replace(partial, kept)
    return kept.read_text(encoding="ascii").strip()


def _digest_of_stream(folder: Path) -> str:
    """Of RecordIO files, without reading them whole."""
    found = hashlib.sha256()
    for name in ("train", "val"):
        size = (folder / f"{name}.rec").stat().st_size
        found.update(f"{name} {size} ".encode())
        found.update((folder / f"{name}.idx").read_bytes())
    return found.hexdigest()


def find(name: str) -> Dataset:
    """One of `DATASETS`."""
    if name not in DATASETS:
        known = ", ".join(map(repr, DATASETS))
        raise DataError(f"the data set is {name!r}; allowed are {known}.")
    return DATASETS[name]


def open_dataset(run: Run, folder: Path, rank: int) -> ArrayBatches | StreamBatches:
    """The batches of one worker.

    Parameters
    ----------
    run : Run
    folder : Path
        From `prepare`.
    rank : int

    Raises
    ------
    DataError
        There are too few images.
    """
    dataset = find(run.dataset)
    if dataset.read is None:
        moments = dataset.mean, dataset.deviation
        return StreamBatches(run, rank, folder, dataset.shape, *moments)
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in NAMES]
    return ArrayBatches(
        run,
        rank,
        arrays[:2],
        arrays[2:],
        mean=dataset.mean,
        deviation=dataset.deviation,
        white=dataset.white,
        flips=dataset.flips,
    )


def _find_files(name: str, dataset: Dataset, data: Path | None) -> list[Path]:
    """Where each of the data set's files is."""
    if not dataset.files:
        return []
    looked_for = ", ".join(dataset.files)
    if data is None:
        raise DataError(
            f"{name} is read from files: give the folder with {looked_for}."
        )
    found, missing = [], []
    for file in dataset.files:
        paths = [data / file, data / f"{file}.gz"][: 2 if name == "mnist" else 1]
        existing = [path for path in paths if path.is_file()]
        found += existing[:1]
        missing += [] if existing else [file]
    if missing:
        zipped = " (or with .gz at the end)" if name == "mnist" else ""
        raise DataError(
            f"{name}: {', '.join(missing)} not found in {data}; it must hold "
            f"{looked_for}{zipped}."
        )
    return found


def _key(paths: list[Path]) -> str:
    """What the source files are: a file that changes has another key."""
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    facts = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    text = json.dumps([CACHE_FORMAT, facts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _store(parts: tuple[Arrays, Arrays], folder: Path) -> None:
    """Write arrays as files of a new folder, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        for name, array in zip(NAMES, [*parts[0], *parts[1]]):
            np.save(partial / f"{name}.npy", array)
        os.replace(partial, folder)
    except OSError as error:
        if not folder.is_dir():  # else another program was faster
            raise DataError(
                f"the decoded data cannot be kept in {folder.parent}: "
                f"{error.strerror or error}. Is the disk full? Make room, or give "
                "another --output."
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_digits(_paths: list[Path]) -> tuple[Arrays, Arrays]:
    """The digits of scikit-learn, with 16 for white, always split the same way."""
    import digits

    images, labels, *test = digits.load_data(DIGITS_SEED)
    pairs = (images, labels), tuple(test)
    return tuple((np.uint8(16 * i), n.astype("uint8")) for i, n in pairs)


def _read_mnist(paths: list[Path]) -> tuple[Arrays, Arrays]:
    """MNIST's four files, in the order of `IDX_NAMES`."""
    arrays = [_read_idx(path, 3 - 2 * (i % 2)) for i, path in enumerate(paths)]
    for images, labels, path in zip(arrays[::2], arrays[1::2], paths[::2]):
        _check_equal(images, labels, path)
    return tuple((i[:, np.newaxis], n) for i, n in zip(arrays[::2], arrays[1::2]))


def _read_idx(path: Path, num_axes: int) -> np.ndarray:
    """An IDX file of unsigned bytes, gzipped or not."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Copy it anew.") from error
    start = 4 + 4 * num_axes
    if content[:4] != bytes([0, 0, 8, num_axes]) or len(content) < start:
        raise DataError(
            f"{path} is no IDX file of bytes with {num_axes} axes: it begins with "
            f"{content[:4].hex()}, not 0000080{num_axes}."
        )
    shape = tuple(np.frombuffer(content[4:start], ">u4").astype(int))
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} holds {len(content) - start} bytes after its header, which "
            f"announces {' x '.join(map(str, shape))}: it is truncated or damaged."
        )
    return np.frombuffer(content, "uint8", offset=start).reshape(shape)


def _check_equal(images: np.ndarray, labels: np.ndarray, path: Path) -> None:
    if len(images) != len(labels):
        raise DataError(f"{path} has {len(images)} images for {len(labels)} labels.")


def _read_cifar10(paths: list[Path]) -> tuple[Arrays, Arrays]:
    """CIFAR-10's two RecordIO files."""
    return tuple(_read_records(path, (3, 32, 32), 10) for path in paths)


def _read_records(path: Path, shape: tuple[int, int, int], num_classes: int) -> Arrays:
    """Decode all images of a RecordIO file; an .idx file beside it is checked."""
    import odsgd_kvstore  # isort: skip  # noqa: F401  before MXNet: prepares NumPy
    from mxnet import MXNetError, image, recordio

    index = path.with_suffix(".idx")
    if index.is_file():
        check_records(path, index)
    images, labels = [], []
    record = recordio.MXRecordIO(str(path), "r")
    try:
        for content in iter(record.read, None):
            header, encoded = recordio.unpack(content)
            pixels = image.imdecode(encoded).asnumpy().transpose(2, 0, 1)
            if pixels.shape != shape or header.label not in range(num_classes):
                raise ValueError(
                    f"shape {pixels.shape}, label {header.label}; allowed are {shape} "
                    f"and 0 to {num_classes - 1}"
                )
            images.append(pixels)
            labels.append(header.label)
        if not images:
            raise ValueError("the file is empty")
    except (MXNetError, TypeError, ValueError, struct.error) as error:
        reason = str(error).strip().splitlines()[-1]
        raise DataError(
            f"{path} is truncated, damaged or not of this data set: after "
            f"{len(images)} good images: {reason}."
        ) from error
    finally:
        record.close()
    return np.stack(images), np.array(labels, "uint8")


DATASETS = {
    "digits": Dataset((1, 8, 8), 10, (), _read_digits, white=16),
    "mnist": Dataset((1, 28, 28), 10, IDX_NAMES, _read_mnist, (0.1307,), (0.3081,)),
    "cifar10": Dataset(
        (3, 32, 32),
        10,
        ("train.rec", "test.rec"),
        _read_cifar10,
        mean=(0.4913, 0.4821, 0.4465),
        deviation=(0.247, 0.243, 0.262),
        flips=True,
    ),
    "imagenet": Dataset(
        (3, 224, 224),
        1000,
        ("train.rec", "train.idx", "val.rec", "val.idx"),
        None,
        mean=(0.485, 0.456, 0.406),
        deviation=(0.229, 0.224, 0.225),
    ),
}
