"""The distributed discrete Gaussian: clients' noise in whole steps, and what privacy it gives.

Each client clips its vector to a norm and adds discrete Gaussian noise to the integers that stand
for it, so that the sum is private for whoever sees it, the server too (Kairouz, Liu and Steinke,
2021, arXiv:2102.06387; the noise of Canonne, Kamath and Steinke, 2020, arXiv:2004.00010).

Rule: a number is drawn by the table of its distribution's tail, in units of 2^-63, cut off at
`CUT` deviations, beyond which a number lies with a chance below 2^-70.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bbnode.components.secure_aggregation.masking import add_mask

CUT: Final = 10
KEY_BYTES: Final = 16
# In steps: the table of the largest one has 10 * 2^16 entries.
MAX_DEVIATION: Final = float(1 << 16)
_PART_DEVIATION: Final = float(1 << 15)
_COARSE: Final = 1 << 9
FINE_DEVIATION: Final = _PART_DEVIATION * math.hypot(_COARSE, 1)


def clipped(vector: npt.NDArray[Any], norm: float) -> npt.NDArray[np.float64]:
    """Return a vector scaled down to an L2 norm, where it is longer."""
    wide = vector.astype(np.float64)
    length = float(np.sqrt(np.sum(wide * wide)))
    return wide if length <= norm else wide * (norm / length)


def sensitivity(norm: float, size: int, steps_per_unit: float) -> float:
    """Return how long a clipped vector can be in steps: rounding moves each number by 1/2."""
    return norm * steps_per_unit + math.sqrt(size) / 2


def margin(deviation: float) -> int:
    """Return the largest number of steps that noise of a deviation has."""
    return math.ceil(CUT * deviation)


def drawn(count: int, deviation: float, key: bytes) -> npt.NDArray[np.int64]:
    """Return discrete Gaussian numbers [count] of a deviation in steps, by a key of 16 bytes."""
    words = np.zeros(count, np.uint64)
    add_mask(words, key)
    table = _tail(deviation)
    # The number of entries above a draw is how far from 0 it lies; one bit is left for the side.
    size = table.size - np.searchsorted(table, (words >> np.uint64(1)).view(np.int64), "right")
    signed: npt.NDArray[np.int64] = np.where(words & np.uint64(1), -size, size)
    return signed


def drawn_finely(count: int, key: bytes) -> npt.NDArray[np.int64]:
    """Return discrete Gaussian numbers [count] of `FINE_DEVIATION` steps, by a key of 16 bytes.

    Each is `_COARSE` times one number of `_PART_DEVIATION` steps, and another one. The sum is as
    near to a discrete Gaussian as its parts are: since the fine part's deviation is 64 of the
    coarse part's steps, these leave a ripple of 2 exp(-2 pi^2 64^2) (Poisson summation).
    """
    both = drawn(2 * count, _PART_DEVIATION, key)
    return both[:count] * _COARSE + both[count:]


@lru_cache(maxsize=4)
def _tail(deviation: float) -> npt.NDArray[np.int64]:
    """Return the chances of |x| >= k in units of 2^-63, for k from the largest down to 1."""
    k = np.arange(margin(deviation), -1, -1, dtype=np.float64)
    weights = np.exp(-(k * k) / (2 * deviation * deviation))
    weights[:-1] *= 2  # both sides; 0 has one
    sums = np.cumsum(weights)  # the smallest ones first, so that tails are exact
    found: npt.NDArray[np.int64] = np.floor(sums[:-1] / sums[-1] * 2.0**63).astype(np.int64)
    return found


def concentrated(sensitivity: float, deviation: float, honest: int, size: int) -> float:
    """Return rho: the sum is rho-zCDP for one client, present or not (theorem 1, equation 4).

    `sensitivity` and each client's `deviation` are in steps; `honest` clients add noise to `size`
    numbers. The sum of discrete Gaussians is none itself: tau bounds the difference.
    """
    exponent = -2 * math.pi**2 * deviation**2
    tau = 10 * sum(math.exp(exponent * k / (k + 1)) for k in range(1, honest))
    plain = sensitivity**2 / (honest * deviation**2)
    bound = min(math.sqrt(plain + 2 * tau * size), math.sqrt(plain) + tau * math.sqrt(size))
    return bound**2 / 2
