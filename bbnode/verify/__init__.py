"""Every method beside plain numpy: rounds of real nodes, and the same by the formula of its paper.

`bbnode verify` runs the checks and prints them; the project's own tests run the same ones.

Rule: the numpy side imports nothing of bbnode. What it expects is written out from the papers, in
float64, and never taken from the code that it judges.
"""

from __future__ import annotations

from bbnode.verify.check import TOLERANCE, Compared, MethodCheck, MethodOutcome, all_checks, judged

__all__ = ["TOLERANCE", "MethodCheck", "Compared", "MethodOutcome", "all_checks", "judged"]
