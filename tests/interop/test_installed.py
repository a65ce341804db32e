"""A missing implementation skips its tests by name, and fails them where it is required."""

from __future__ import annotations

import pytest

from tests.interop import installed


def test_missing_ones_skip_and_fail_where_they_are_required(monkeypatch):
    monkeypatch.setattr(installed, "_REQUIRED", False)
    mark = installed.needs("js-libp2p", "").mark
    assert mark.args == (True,)
    assert mark.kwargs["reason"].startswith("js-libp2p is not installed")
    assert installed.needs("js-libp2p", "/somewhere").mark.args == (False,)
    monkeypatch.setattr(installed, "_REQUIRED", True)
    assert installed.needs("js-libp2p", "/somewhere").mark.args == (False,)
    with pytest.raises(pytest.fail.Exception, match="js-libp2p is not installed"):
        installed.needs("js-libp2p", "")
