"""Generation with requests that arrive together, against the same requests one by one, on a small Llama.

The weights are random: how fast a token comes does not depend on what it says. Peers are the same server with one
request at a time, and transformers' own ``generate`` in a process of its own, one prompt after the other. Each computes
with one thread, and CPU time is compared: what else runs on the machine makes little difference then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.rig import models
from tests.rig.inference import InferenceServer, inference_server

from bench.bars import Bar, Row, print_rows

_REQUESTS = 8
_TOKENS = 64
_AT_ONCE = (1, 4, 8)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_SIZE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
}
_PEER = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
for line in sys.stdin:
    prompts, tokens = json.loads(line)
    begin = time.process_time()
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                           do_sample=False)
    print(time.process_time() - begin, flush=True)
"""


def measure(rounds: int) -> list[Bar]:
    with tempfile.TemporaryDirectory() as folder:
        model = models.llama(Path(folder) / "llama", **_SIZE)
        words = models.tokenizer()
        prompts = [words(f"{models.WORDS[at:]}")["input_ids"] for at in range(0, 4 * _REQUESTS, 4)]
        rows = {at_once: Row(f"{_REQUESTS} requests, {at_once} at once") for at_once in _AT_ONCE}
        peer_row = Row("transformers generate, one by one")
        options = ("--model", str(model), "--max-batch", "8")
        with inference_server(*options, cwd=Path(folder), env=_ONE_THREAD) as server, _peer(model) as peer:
            server.wait_ready()
            for _ in range(rounds + 1):  # the first round warms up
                for at_once, row in rows.items():
                    row.seconds.append(_asked(server, prompts, at_once))
                peer_row.seconds.append(_generated(peer, prompts))
    for row in (*rows.values(), peer_row):
        del row.seconds[0]
        row.remark = f"{_REQUESTS * _TOKENS / row.median_s:.0f} tokens/s of CPU time"
    print_rows(f"Llama of 25 million parameters, {_TOKENS} tokens each", [*rows.values(), peer_row])
    return [
        Bar("8 requests at once take", rows[8].median_s, rows[1].median_s, "the same one by one", 0.4),
        Bar("4 requests at once take", rows[4].median_s, rows[1].median_s, "the same one by one", 0.6),
        Bar("requests one by one take", rows[1].median_s, peer_row.median_s, "transformers' generate", 1.15),
    ]


def _asked(server: InferenceServer, prompts: list[list[int]], at_once: int) -> float:
    def one(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "logit_bias": {"1": -100}}
        status, found = server.post("/v1/completions", body)
        assert status == 200, found
        assert found["usage"]["completion_tokens"] == _TOKENS, found["usage"]

    begin = _cpu_s(server.process.pid)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, prompts))
    return _cpu_s(server.process.pid) - begin


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peer(model: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", _PEER, str(model)]
    env = {**os.environ, **_ONE_THREAD}
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _generated(peer: subprocess.Popen[str], prompts: list[list[int]]) -> float:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(json.dumps([prompts, _TOKENS]) + "\n")
    peer.stdin.flush()
    return float(peer.stdout.readline())
