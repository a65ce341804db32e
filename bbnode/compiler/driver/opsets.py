"""Versions of ONNX's opsets in one program: the highest that any part imports.

Rule: a program that imports several versions of `ai.onnx` runs in the highest, as in ONNX, if
every op has the same meaning there as in the version of its own function. Otherwise nothing is
changed, and `validate` refuses the op that differs in the model's version.
"""

from __future__ import annotations

from collections.abc import Iterable

from bbnode.ir import keys
from bbnode.ir.graph import Function, Opset, Program, is_onnx_domain
from bbnode.ir.versions import means_the_same

_DOMAINS = ("", keys.ONNX_ML_DOMAIN)


def take_highest_opsets(program: Program) -> None:
    """Make a program and its functions import the highest version of each of ONNX's opsets."""
    for domain in _DOMAINS:
        imports = (program.opset_imports, *(f.opset_imports for f in program.functions))
        versions = {version for listed in imports for version in _versions(listed, domain)}
        if len(versions) < 2:
            continue
        highest = max(versions)
        if all(_fits(function, domain, highest) for function in program.functions):
            program.opset_imports = _raised(program.opset_imports, domain, highest)
            for function in program.functions:
                function.opset_imports = _raised(function.opset_imports, domain, highest)


def _fits(function: Function, domain: str, highest: int) -> bool:
    own = _versions(function.opset_imports, domain)
    nodes = [n for n in function.all_nodes() if _short(n.domain) == domain] if own else []
    return all(means_the_same(node, version, highest) for version in own for node in nodes)


def _versions(imports: Iterable[Opset], domain: str) -> set[int]:
    return {entry.version for entry in imports if _short(entry.domain) == domain}


def _raised(imports: list[Opset], domain: str, version: int) -> list[Opset]:
    raised = (
        Opset(domain, version) if _short(entry.domain) == domain else entry for entry in imports
    )
    return list(dict.fromkeys(raised))


def _short(domain: str) -> str:
    return "" if is_onnx_domain(domain) else domain
