"""2-bit compression on arrays, against the recurrence in numpy; no store."""

import numpy as np
import pytest
from mxnet import nd

from odsgd_kvstore.compression import TwoBit, digits, num_words

f32 = np.float32
WORKERS = [1, 2, 3, 4, 8, 16, 33]
SIZES = [1, 2, 5, 9, 14, 15, 1000, 4097]


def quantised(residual, gradient, threshold):
    """(q, r) of one push: r += g; q = t where r >= t, -t where r <= -t; r -= q."""
    residual = residual + gradient
    q = np.zeros_like(residual)
    q[residual >= f32(threshold)] = f32(threshold)
    q[residual <= -f32(threshold)] = -f32(threshold)
    return q, residual - q


class Worker:
    """One worker's arrays, and the same in numpy."""

    def __init__(self, size, num_workers, threshold):
        self._two_bit, self._threshold = TwoBit(threshold, num_workers), threshold
        count = num_words(size, num_workers)
        self.words = nd.zeros(count)
        self._codes = nd.zeros(count * digits(num_workers))
        self._residuals = nd.zeros(count * digits(num_workers))
        self.residual = np.zeros(size, f32)

    def push(self, gradient):
        """q by the recurrence; the words are ours."""
        given = nd.array(gradient)
        self._two_bit.compress(given, self._residuals, self._codes, self.words)
        q, self.residual = quantised(self.residual, gradient, self._threshold)
        kept = self._residuals.asnumpy()
        np.testing.assert_array_equal(kept[: gradient.size], self.residual)
        np.testing.assert_array_equal(kept[gradient.size :], 0)
        np.testing.assert_array_equal(given.asnumpy(), gradient)
        return q


def restored(words, size, num_workers, threshold):
    """What a server makes of the sum of the workers' words."""
    total, out = words[0].copy(), nd.full(size, np.nan)
    for more in words[1:]:
        total += more
    TwoBit(threshold, num_workers).restore(total, out)
    return out.asnumpy()


def total(parts, threshold):
    """The sum of q, as a whole number of thresholds."""
    count = sum(np.round(part / f32(threshold)) for part in parts)
    return count.astype(f32) * f32(threshold)


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.5, 0.37])
def test_sum_is_the_recurrence_s_exactly_over_several_pushes(
    num_workers, size, threshold
):
    random = np.random.RandomState(size)
    workers = [Worker(size, num_workers, threshold) for _ in range(num_workers)]
    for _ in range(4):
        parts = [w.push(random.normal(0, 0.6, size).astype(f32)) for w in workers]
        got = restored([w.words for w in workers], size, num_workers, threshold)
        np.testing.assert_array_equal(got, total(parts, threshold))


@pytest.mark.parametrize("num_workers", [*WORKERS, 64, 200])
def test_extreme_sums_are_exact(num_workers):
    size = 3 * digits(num_workers) + 1
    largest = np.full(size, 9.0, f32)
    alternating = largest * (-1.0) ** np.arange(size, dtype=f32)
    for gradient in (largest, -largest, alternating, -alternating):
        worker = Worker(size, num_workers, 0.37)
        q = worker.push(gradient)  # the same on every worker
        got = restored([worker.words * num_workers], size, num_workers, 0.37)
        assert set(np.abs(q)) == {f32(0.37)}
        np.testing.assert_array_equal(got, np.sign(q) * f32(num_workers) * f32(0.37))


@pytest.mark.parametrize("num_workers", [*range(1, 9), 16, 33, 64])
def test_every_digit_is_read_beside_any_other(num_workers):
    # Sums of -N, -1, 0, 1, N in each of two digits, the others all N or all -N.
    count, base = digits(num_workers), 2 * num_workers + 1
    powers = np.array([base**digit for digit in range(count)])
    values = (-num_workers, -1, 0, 1, num_workers)
    for first in range(count):
        for rest in (-num_workers, num_workers):
            table = np.full((25, count), rest)
            table[:, first] = np.repeat(values, 5)
            table[:, (first + 1) % count] = np.tile(values, 5)
            words = nd.array(table @ powers)
            assert (words.asnumpy() == table @ powers).all()
            got = restored([words], 25 * count, num_workers, 1.0)
            np.testing.assert_array_equal(got.reshape(count, 25), table.T)


def test_a_number_at_the_threshold_is_sent():
    worker = Worker(4, 2, 0.37)
    q = worker.push(np.array([0.37, -0.37, 0.3699, -0.3699], f32))
    assert q.tolist() == [f32(0.37), -f32(0.37), 0, 0]
    got = restored([worker.words], 4, 2, 0.37)
    np.testing.assert_array_equal(got, q)


def test_what_is_left_over_is_sent_later():
    worker, sent = Worker(3, 2, 0.5), np.zeros(3, f32)
    for _ in range(8):
        sent += worker.push(np.array([0.125, -0.25, 3.0], f32))
    # 8 * 0.125 = 1, 8 * -0.25 = -2; a large gradient sends one threshold a push.
    assert sent.tolist() == [1.0, -2.0, 4.0]


@pytest.mark.parametrize(
    "num_workers, count", [(1, 14), (2, 9), (3, 8), (4, 7), (8, 5), (16, 4), (33, 3)]
)
def test_numbers_in_a_word(num_workers, count):
    assert digits(num_workers) == count
    assert (
        (2 * num_workers + 1) ** count <= 2**23 < (2 * num_workers + 1) ** (count + 1)
    )
    assert [num_words(n, num_workers) for n in (1, count, count + 1)] == [1, 1, 2]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden(bad):
    size, gradient = 100, np.full(100, 0.7, f32)
    gradient[37] = bad
    two_bit, count = TwoBit(0.5, 2), num_words(size, 2)
    room = count * digits(2)
    words = nd.zeros(count)
    two_bit.compress(nd.array(gradient), nd.zeros(room), nd.zeros(room), words)
    out = restored([words], size, 2, 0.5)
    # Number 37 and those that share its word; all others are as ever.
    shared = [i for i in range(size) if i % count == 37 % count]
    assert np.flatnonzero(np.isnan(out)).tolist() == shared
    assert (np.delete(out, shared) == f32(0.5)).all()
