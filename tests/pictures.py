"""RecordIO files of small pictures, for tests; needs no library that writes images."""

import struct
import zlib

import numpy as np
from mxnet import recordio

HEIGHT, WIDTH = 40, 44


def write_records(path, labels, seed=0):
    """A .rec, and its .idx, of a picture for each label; labels 0 to 2 have colours.

    Pixels are 0 to 99, evenly, and 150 more in red, green or blue.
    """
    random = np.random.RandomState(seed)
    noise = [random.randint(0, 100, (HEIGHT, WIDTH, 3)) for _ in labels]
    pictures = [n + 150 * (np.arange(3) == label) for n, label in zip(noise, labels)]
    pack_records(path, pictures, labels)


def pack_records(path, pictures, labels):
    """A .rec, and its .idx, of pictures: (height, width, 3), 0 to 255, red first."""
    writer = recordio.MXIndexedRecordIO(str(path.with_suffix(".idx")), str(path), "w")
    for i, (pixels, label) in enumerate(zip(pictures, labels)):
        header = recordio.IRHeader(0, float(label), i, 0)
        writer.write_idx(i, recordio.pack(header, png(pixels.astype("uint8"))))
    writer.close()


def png(pixels):
    """`pixels` (height, width, 3) of uint8, red first, as the bytes of a PNG file."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
