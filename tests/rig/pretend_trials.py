"""A training script whose speed is made up, and which writes what ``ugro.train`` would: without torch it is quick.

Each node needs as many milliseconds for a sample as its argument says: ``train.py FOLDER n001=10 n002=20``. In a trial
it writes steps at two batch sizes; together, and as the training itself, what the ranks do with the best shares.
"""

from __future__ import annotations

SCRIPT = '''
import json, os, sys, time
from pathlib import Path

import ugro.train  # what a plan looks for

FOLDER, BATCH, EXCHANGE_S = Path(sys.argv[1]), 96, 0.01
MS = dict((name, float(ms)) for name, ms in (word.split("=") for word in sys.argv[2:] if "=" in word))
TRIAL, NODE, RANK, RANKS = os.environ.get("UGRO_TRIAL"), os.environ["UGRO_NODE"], *(
    int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
place = FOLDER / f"{os.environ['UGRO_JOB']}.{RANK}"
place.write_text(NODE)
print(f"trial {TRIAL} on {NODE}", flush=True)
if "--wait" in sys.argv and TRIAL:
    time.sleep(600)
if "--apart" in sys.argv and TRIAL and TRIAL.startswith("joint"):
    sys.exit("cannot reach the others")
if RANK:
    sys.exit(0)
places = [FOLDER / f"{os.environ['UGRO_JOB']}.{rank}" for rank in range(RANKS)]
deadline = time.monotonic() + 30
while not all(one.exists() and one.read_text() for one in places) and time.monotonic() < deadline:
    time.sleep(0.01)
nodes = [one.read_text() for one in places]
lines = []


def put(kind, **fields):
    lines.append(json.dumps({"kind": kind, "time": 1.0, "attempt": 1, "rank": 0, **fields}))


def step(number, shares):
    own = [0.02 + share * MS[node] / 1000 for share, node in zip(shares, nodes)]
    zero = [0.0] * len(own)
    exchange_s = EXCHANGE_S if len(own) > 1 else 0.0
    put("profile", step=number, epoch=0, samples=sum(shares), loss=1.0, shares=shares, own_s=own,
        step_s=max(own) + exchange_s, data_s=zero, forward_s=zero, backward_s=zero, waiting_s=zero,
        communication_s=[exchange_s] * len(own), optimizer_s=[0.02] * len(own))


put("run", nodes=nodes, device="cpu", mode="adaptive")
put("model", gradient_bytes=1000000, parameters=250000, comm_hook=None)
if TRIAL:
    pairs = [[one, other, EXCHANGE_S] for one in range(RANKS) for other in range(one + 1, RANKS)]
    put("trial", global_batch=BATCH, least=1, sizes=[16, BATCH], nodes=nodes, exchange_s=EXCHANGE_S, pairs=pairs)
weights = [1 / MS[node] for node in nodes]
shares = [round(BATCH * one / sum(weights)) for one in weights]
shares[0] += BATCH - sum(shares)
for number in range(16):
    step(number, [(16, BATCH)[number // 4 % 2]] if TRIAL and TRIAL.startswith("solo") else shares)
Path(os.environ["UGRO_OUTPUT"], "metrics.jsonl").write_text("\\n".join(lines) + "\\n")
'''
