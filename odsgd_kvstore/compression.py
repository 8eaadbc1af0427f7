"""2-bit compression of a pushed gradient, with error feedback; arrays only.

What is pushed is q = -t, 0 or +t per number, and what is left over is kept for the next
push (error feedback), as MXNet's own '2bit' does:

    r := r + g;  q = t [r >= t] - t [r <= -t];  r := r - q

MXNet's own cannot be used: once it is switched on, every push of the process is
compressed, whole pushes (`full_every`) and our own messages too. Here q / t travels as
digits of numbers in base 2N + 1, N being the number of workers, which the servers of
ps-lite add up like any gradient: the digits of the sum are the sums of the digits. All
numbers are whole and below 2^23, so float32 holds them exactly.

References
----------
E. Yu, D. Dong, Y. Xu, S. Ouyang, X. Liao, CD-SGD: Distributed Stochastic Gradient
Descent with Compression and Delay Compensation, ICPP 2021.
"""

from __future__ import annotations

from mxnet import ndarray as nd

_LARGEST = 2**23


def digits(num_workers: int) -> int:
    """How many numbers travel as one float32: 14 with 1 worker, 9 with 2, 5 with 8."""
    base, count = 2 * num_workers + 1, 1
    while base ** (count + 1) <= _LARGEST:
        count += 1
    return count


def num_words(size: int, num_workers: int) -> int:
    """How many float32 a compressed gradient of `size` numbers takes."""
    return -(-size // digits(num_workers))


class TwoBit:
    """Compresses on a worker, restores the sum on a server.

    Parameters
    ----------
    threshold : float
        t > 0, in the units of the gradient that is pushed.
    num_workers : int
    """

    def __init__(self, threshold: float, num_workers: int) -> None:
        self._threshold = threshold
        self._base = 2 * num_workers + 1
        self._digits = digits(num_workers)
        powers = [self._base**digit for digit in range(self._digits)]
        self._powers = nd.array(powers)
        self._ones = nd.ones(self._digits)

    def compress(
        self,
        gradient: nd.NDArray,
        residuals: nd.NDArray,
        codes: nd.NDArray,
        words: nd.NDArray,
    ) -> None:
        """Write q / t of gradient and residuals as `words`; returns before it is done.

        Parameters
        ----------
        gradient : NDArray, float32, (n,)
            Not changed.
        residuals, codes : NDArray, float32, (m * digits,)
            Zeros at first, then what this leaves in them. The first n residuals are r
            of the compressed pushes before.
        words : NDArray, float32, (m,), m = num_words(n)

        Notes
        -----
        Where r is infinite or not a number, so is the word that carries it: the weights
        show it, as they do without compression.
        """
        residual = residuals._slice(0, gradient.size)
        code = codes._slice(0, gradient.size)
        nd.elemwise_add(residual, gradient, out=residual)
        below = residual <= -self._threshold
        nd._internal._greater_equal_scalar(residual, self._threshold, out=code)
        nd.elemwise_sub(code, below, out=code)
        nd._internal._mul_scalar(code, self._threshold, out=below)
        nd.elemwise_sub(residual, below, out=residual)
        shape = (self._digits, words.size)
        nd.dot(self._powers, codes.reshape(shape), out=words)
        words += nd.dot(self._ones, residuals.reshape(shape)) * 0.0

    def restore(self, words: nd.NDArray, gradient: nd.NDArray) -> None:
        """Write the sum over the workers of q into `gradient`.

        Returns before it is done. The whole number nearest to words / base^j has all
        digits from j on, as those below make less than half of one; digit j is that
        less base times the next. In float32 the quotients are exact enough: they are
        below 2^22 / base, so rounding moves them by a quarter / base at most, and half
        a / base is what lies between them and the next half.

        Parameters
        ----------
        words : NDArray, float32, (m,)
            The sum of what the workers' `compress` wrote.
        gradient : NDArray, float32, (n,)
        """
        powers = self._powers.reshape((-1, 1))
        rounded = nd.broadcast_div(words.reshape((1, -1)), powers)
        rounded += 0.5
        nd.floor(rounded, out=rounded)
        flat, count = rounded.reshape(-1), words.size
        if flat.size > count:
            below = flat._slice(0, flat.size - count)
            above = flat._slice(count, flat.size) * self._base
            nd.elemwise_sub(below, above, out=below)
        code = flat._slice(0, gradient.size)
        nd._internal._mul_scalar(code, self._threshold, out=gradient)
