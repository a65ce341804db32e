"""Errors of a graph that is to be differentiated.

Rule: all of these are the model author's to fix, and each names its node.
"""

from __future__ import annotations

from bbnode.ir.errors import AuthorError


class AutodiffError(AuthorError):
    """Base of the errors of `bbnode.components.autodiff`."""


class UnsupportedGradient(AutodiffError):
    """An op between the parameters and the loss has no rule in the table."""

    def __init__(self, *, node: str, op_type: str, domain: str) -> None:
        self.node = node
        self.op_type = op_type
        self.domain = domain
        super().__init__(
            f"node {node!r}: no gradient rule for {domain or 'ai.onnx'}.{op_type}; use an op "
            "that has one (bbnode.components.autodiff.supported_ops()), or register a rule "
            f"with @bbnode.components.autodiff.vjp({op_type!r})"
        )


class GradientRuleError(AutodiffError):
    """A rule exists but cannot be applied to this node."""

    def __init__(self, *, node: str, op_type: str, reason: str, remedy: str) -> None:
        self.node = node
        self.op_type = op_type
        self.reason = reason
        super().__init__(f"node {node!r} ({op_type}): {reason}; {remedy}")


class InvalidForwardModel(AutodiffError):
    """The forward model cannot be trained."""

    def __init__(self, *, what: str, remedy: str) -> None:
        self.what = what
        super().__init__(f"forward model: {what}; {remedy}")


class UnknownLoss(AutodiffError):
    """The name of the loss is in no table."""

    def __init__(self, *, loss: str, known: tuple[str, ...]) -> None:
        self.loss = loss
        self.known = known
        super().__init__(f"unknown loss {loss!r}; choose one of {', '.join(known)}")


class LossDoesNotFit(AutodiffError):
    """A loss is of something else than what the model's output is, by the ops that make it."""

    def __init__(self, *, loss: str, why: str, remedy: str) -> None:
        self.loss = loss
        super().__init__(f"loss {loss!r} does not fit the model: {why}; {remedy}")


class TrainingSettingRefused(AutodiffError):
    """A setting of the loss, the optimizer or the training mode means nothing for this model."""

    def __init__(self, given: str, why: str, remedy: str) -> None:
        self.given = given
        super().__init__(f"{given}: {why}; {remedy}")
