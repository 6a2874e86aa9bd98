"""A server that answers as engines do, without a model: what a service's command can be where none is needed.

``python pretend_engine.py HOST PORT``. A chat repeats its last message, a word at a time; the message ``wait`` never
ends, and ``leave`` is noted in the file ``$LEFT`` when the client leaves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = """\
ugro_inference_tokens_total{kind="prompt"} 12
ugro_inference_tokens_total{kind="generated"} 34
ugro_inference_batch_size_bucket{le="+Inf"} 4
ugro_inference_batch_size_sum 10
ugro_inference_batch_size_count 4
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(METRICS.encode(), "text/plain")
        else:
            self._answer(b'{"status": "ok"}', "application/json")

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/chat/completions":
            self._stream(body["messages"][-1]["content"])
        elif self.path == "/v1/completions":
            self._stream(body["prompt"])
        elif self.path == "/classify":
            scores = [{"label": "<b>good</b>", "score": 0.75}, {"label": "bad", "score": 0.25}]
            self._json({"results": [{"scores": scores} for _ in body["texts"]]})
        elif self.path == "/v1/embeddings":
            self._json({"data": [{"embedding": [0.5] * 16} for _ in body["input"]]})
        else:
            self._json({"error": {"message": f"this model has no {self.path}"}}, 404)

    def _stream(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        words = text.split()
        try:
            while words or "wait" in text:
                word = words.pop(0) if words else "more"
                self._event({"choices": [{"index": 0, "delta": {"content": f"{word} "}, "text": ""}]})
                time.sleep(0.02)
            self._event({"choices": [], "usage": {"completion_tokens": len(text.split())}})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except OSError:
            with open(os.environ["LEFT"], "a") as file:
                file.write("left\n")

    def _event(self, document: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.flush()

    def _json(self, document: dict[str, Any], status: int = 200) -> None:
        self._answer(json.dumps(document).encode(), "application/json", status)

    def _answer(self, content: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
