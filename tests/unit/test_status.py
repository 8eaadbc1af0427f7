"""A server's status as float32 numbers."""

import numpy as np
import pytest

from odsgd_kvstore import status
from odsgd_kvstore.commands import PROTOCOL
from odsgd_kvstore.config import LEAST_BIGARRAY_BOUND
from odsgd_kvstore.status import Status

NONCE = "00ff" * 8
SIZES = [31, 32, 33, 34, 35, 64, 100, 999, 1399, 1400]


@pytest.mark.parametrize("size", SIZES)
def test_status_comes_back_equal(size):
    said = Status(nonce=NONCE, error="KeyError: 7")
    array = status.encode(said, size)
    assert array.shape == (size,) and array.dtype == np.float32
    assert status.decode(array) == said


@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_exact_in_float32(size):
    array = status.encode(Status(NONCE, "\xff" * 5000), size)
    assert np.all(array == array.astype(np.int64))
    assert array.max() < 2**24


def test_every_byte_survives():
    # All of latin-1 as UTF-8, at each of the three places in a number.
    for shift in range(3):
        text = "x" * shift + "".join(map(chr, range(1, 256)))
        said = Status(nonce=bytes(range(240, 256)).hex(), error=text)
        assert status.decode(status.encode(said, 400)) == said


@pytest.mark.parametrize("size", SIZES)
def test_long_text_loses_its_end_only(size):
    room = 3 * (size - 5) - 16
    text = "".join(chr(33 + i % 90) for i in range(room + 50))
    read = status.decode(status.encode(Status(NONCE, text), size))
    assert read.error == text[:room]
    assert read.nonce == NONCE


def test_text_that_fits_exactly_is_whole():
    room = 3 * (31 - 5) - 16
    said = Status(NONCE, "e" * room)
    assert status.decode(status.encode(said, 31)) == said


@pytest.mark.parametrize("cut", range(4))
def test_text_cut_within_a_character_is_still_text(cut):
    room = 3 * (64 - 5) - 16
    text = "a" * cut + "\U0001f40d" * room
    read = status.decode(status.encode(Status(NONCE, text), 64)).error
    whole = (room - cut) // 4
    assert read[: cut + whole] == text[: cut + whole]
    assert set(read[cut + whole :]) <= {"\ufffd"}


def test_unicode_text_is_unchanged():
    said = Status(NONCE, "ValueError: größer als 3 – 学習率 \U0001f40d")
    assert status.decode(status.encode(said, 200)) == said


def test_nothing_written_yet_is_not_ours():
    assert status.decode(np.zeros(31, np.float32)).protocol == -1


def test_gradient_sums_are_not_ours():
    rng = np.random.RandomState(0)
    assert status.decode(rng.randn(31).astype(np.float32)).protocol == -1


def test_another_protocol_is_read_as_it_is():
    said = Status(NONCE, "", PROTOCOL + 1)
    assert status.decode(status.encode(said, 31)).protocol == PROTOCOL + 1


@pytest.mark.parametrize("is_stock", [False, True])
def test_kind_of_server_comes_back_equal(is_stock):
    said = Status(NONCE, "KeyError: 7", is_stock=is_stock)
    assert status.decode(status.encode(said, 31)) == said


def test_no_error_is_the_empty_text():
    assert status.decode(status.encode(Status(NONCE), 31)) == Status(
        NONCE, "", PROTOCOL
    )


@pytest.mark.parametrize(
    "bound, size",
    [(LEAST_BIGARRAY_BOUND, 31), (100, 99), (1400, 1399), (1401, 1400), (10**6, 1400)],
)
def test_length_is_below_the_bound_so_that_it_is_not_cut(bound, size):
    assert status.length(bound) == size < bound
