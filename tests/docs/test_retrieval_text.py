"""The code of "Text" in docs/retrieval.md runs, with a tiny encoder in the place of MiniLM."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.components.encoders import tiny_encoder

PAGE = (Path(__file__).parents[2] / "docs" / "retrieval.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.partition("\n## Text\n")[2], re.DOTALL)[:3]


class Stub(BaseHTTPRequestHandler):
    """A server of language models that answers how long the prompt is."""

    asked: dict[str, Any]

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        Stub.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = {"choices": [{"message": {"role": "assistant", "content": "See [1]."}}]}
        content = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_the_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_encoder(tmp_path / "all-MiniLM-L6-v2")
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"docs/retrieval.md, text {number}", "exec"), names)
    finally:
        for node in (*names.get("shards", ()), names.get("asker")):
            if node is not None:
                node.stop()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("(2, 16) ")
    assert len(said) == 4
    found = names["found"]
    assert {hit.metadata["owner"] for hit in found["results"].hits()} <= {"town", "school"}

    with HTTPServer(("127.0.0.1", 0), Stub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            asked = names["prompt"]("Where?", found)
            assert names["answer"](where, "my-model", asked) == "See [1]."
        finally:
            server.shutdown()
    (message,) = Stub.asked["messages"]
    for hit, passage in zip(found["results"].hits(), found["passages"], strict=True):
        assert f"(from {hit.sender}) {passage}" in message["content"]
    assert message["content"].endswith("Question: Where?")
