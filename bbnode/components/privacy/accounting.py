"""Costs of noisy sums: epsilon by dp-accounting, and the ledger of what a node has spent.

Rule: a cost is charged before anything is sent, and never given back: a round that fails costs what
one that succeeds does. A ledger has what was charged, not its epsilon, so that it holds for any
delta. Neighbours are data sets that differ by one party, who is there or not.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from bbnode.components.libraries import DP_ACCOUNTING
from bbnode.components.privacy.errors import AccountantUnavailable, LedgerUnavailable
from bbnode.ir.installation import install

ACCOUNTANTS: Final = ("rdp", "pld")
MAX_LEDGER_BYTES: Final = 1 << 20

# (sampling rate, noise multiplier) of a Gaussian sum -> how many of them. A rate of 1: of all.
Charges: TypeAlias = Mapping[tuple[float, float], int]


def require_library() -> None:
    """Raise AccountantUnavailable where dp-accounting is not installed, without importing it."""
    if DP_ACCOUNTING.is_missing:
        raise _missing()


def _missing() -> AccountantUnavailable:
    command = install(DP_ACCOUNTING.requirement)
    return AccountantUnavailable(f"differential privacy needs dp-accounting: {command}")


def library() -> Any:
    """Return dp_accounting; AccountantUnavailable where it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise _missing() from error
    logging.getLogger("absl").addFilter(_is_news)
    return dp_accounting


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for what the library says of each order that it leaves out, as it may.

    A bound is the least of many orders; without one of them it is no smaller.
    """
    return "Excluding this order" not in str(record.msg)


def epsilon_of(charges: Charges, delta: float, accountant: str = "rdp") -> float:
    """Return the epsilon at `delta` of all charges together; infinity where there is none.

    "rdp": by Rényi divergences (Mironov, 2017, arXiv:1702.07476; with Poisson sampling Mironov,
    Talwar and Zhang, 2019, arXiv:1908.10530). "pld": by the distribution of the privacy loss, which
    is closer, and takes longer. Raises AccountantUnavailable.
    """
    dp = library()
    kinds = [(kind, count) for kind, count in sorted(charges.items()) if count]
    if not kinds:
        return 0.0
    if not all(noise > 0 for (_, noise), _ in kinds):
        return math.inf
    if accountant == "pld":
        made = dp.pld.PLDAccountant()
        for (rate, noise), count in kinds:
            made.compose(_event(rate, noise), count)
        found = float(made.get_epsilon(delta))
    else:
        divergences = sum(count * _divergences(*kind) for kind, count in kinds)
        found = float(dp.rdp.compute_epsilon(dp.rdp.RdpAccountant().orders, divergences, delta)[0])
    return math.inf if math.isnan(found) else found


def _event(rate: float, noise: float) -> Any:
    dp = library()
    event = dp.GaussianDpEvent(noise)
    return event if rate >= 1 else dp.PoissonSampledDpEvent(rate, event)


@lru_cache(maxsize=64)  # a third of a second each, and they add up
def _divergences(rate: float, noise: float) -> Any:
    """Return the Rényi divergences of one sum, of the orders that the library takes by default."""
    return library().rdp.RdpAccountant().compose(_event(rate, noise)).rdp


def epsilon_after(
    rounds: int, *, noise: float, delta: float, sampling: float = 1.0, accountant: str = "rdp"
) -> float:
    """Return the epsilon at `delta` of so many rounds, to plan with.

    `noise` is the multiplier: the deviation over the clip. `sampling` is the rate of Poisson
    sampling; 1: everybody, or a cohort that is not drawn in secret. Raises AccountantUnavailable.
    """
    return epsilon_of({(float(sampling), float(noise)): rounds}, delta, accountant)


class PrivacyLedger:
    """Record of what was charged; with a file, on disk before it counts, whatever node goes on.

    A snapshot is written now and then, so that a crash or an older snapshot may forget charges that
    are in no file.
    """

    def __init__(self, path: str = "") -> None:
        self._path = Path(path) if path else None
        self._charges: dict[tuple[float, float], int] = {}
        self.take_over(self._read())

    @property
    def charges(self) -> Charges:
        """The charges so far."""
        return dict(self._charges)

    def charged(self, rate: float, noise: float, count: int = 1) -> Charges:
        """Return what the charges would be with `count` more."""
        return {**self._charges, (rate, noise): self._charges.get((rate, noise), 0) + count}

    def charge(self, rate: float, noise: float, count: int = 1) -> None:
        """Charge `count` more; LedgerUnavailable where the file can't be written: none is charged.

        The file has them when this returns.
        """
        charges = self.charged(rate, noise, count)
        if self._path is not None:
            self._write(self._path, charges)
        self._charges = dict(charges)

    def take_over(self, charges: Charges) -> None:
        """Count what another life of the node charged: of each kind the higher number."""
        for kind, count in charges.items():
            self._charges[kind] = max(count, self._charges.get(kind, 0))

    def _read(self) -> Charges:
        if self._path is None or not self._path.exists():
            return {}
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_LEDGER_BYTES + 1)
            if len(data) > MAX_LEDGER_BYTES:
                raise ValueError(f"it has more than {MAX_LEDGER_BYTES} bytes")
            return charges_from(json.loads(data))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise LedgerUnavailable(
                f"the ledger {self._path} can't be read: {error}; restore it: without it nobody "
                "knows what was spent"
            ) from error

    @staticmethod
    def _write(path: Path, charges: Charges) -> None:
        new = path.with_name(path.name + ".new")
        try:
            with new.open("w", encoding="ascii") as file:
                json.dump(rows_of(charges), file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise LedgerUnavailable(
                f"the ledger {path} can't be written: {error}; no round begins without it"
            ) from error


def rows_of(charges: Charges) -> list[list[float | int]]:
    """Return charges as rows [rate, noise, count]."""
    return [[rate, noise, count] for (rate, noise), count in sorted(charges.items())]


def charges_from(rows: Any) -> dict[tuple[float, float], int]:
    """Return charges of `rows_of`; ValueError or TypeError for anything else."""
    found: dict[tuple[float, float], int] = {}
    for rate, noise, count in rows:
        good = 0 < rate <= 1 and 0 < noise < math.inf and type(count) is int and count >= 0
        if not good:
            raise ValueError(f"[{rate!r:.30}, {noise!r:.30}, {count!r:.30}] is no charge")
        found[float(rate), float(noise)] = count
    return found
