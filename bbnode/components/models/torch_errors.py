"""Errors of modules of PyTorch that are exported."""

from __future__ import annotations

from bbnode.ir.errors import AuthorError


class ExportFailed(AuthorError):
    """A module can't be exported to an ONNX model that gives what the module gives."""
