"""Local SGD against synchronous training where the exchange of gradients costs more than it brings.

    python -m bench local --steps 40

First the small model of ``bench balance`` on three unequal ranks; then a GPT of 25 million parameters on two ranks
whose network is shaped to 1 Gbit/s, for ten times as many steps: long enough to be past the first ones, which decide
nothing about the loss at the end. All of it is measured in one run, and the load of others is stated beside it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.balance import ROOT, Case, OtherLoad, environment, free_port, groups, together
from bench.bars import Bar
from bench.shaped_link import Shaped, missing, shaped_link
from ugro.lab import lab as cgroups

_RATE = "1gbit"
_GPT_STEPS = 10  # for each of the MLP's
_MLP = Case("mlp", 384, is_worth_sharing=False)


def measure(steps: int) -> list[Bar]:
    return [*_unequal(steps), *_slow_network(_GPT_STEPS * steps)]


def _unequal(steps: int) -> list[Bar]:
    hierarchy = cgroups.cpu_hierarchy()
    if hierarchy is None:
        print("no CPU control groups on this machine; unequal ranks are not measured\n")
        return []
    others = OtherLoad()
    with tempfile.TemporaryDirectory() as folder, groups(hierarchy, ["rank0", "rank1", "rank2"]) as places:
        port = free_port()
        envs = [environment(hierarchy.version, rank, place, port) for rank, place in enumerate(places)]
        found = _together(Path(folder), ["mlp", str(steps)], envs, [[], [], []])
    alone, balanced, local = (found[name]["samples_per_s"] for name in ("alone", "sync", "local"))
    print(f"\nmlp, global batch {_MLP.global_batch}, three unequal ranks; others used {others.cores():.1f} cores")
    for title, speed in (("the fastest alone", alone), ("balanced, every step", balanced), ("local SGD", local)):
        print(f"{title:<34}{speed:>12.0f} samples/s{speed / alone:>8.2f} of the fastest alone")
    return [
        Bar("mlp: local SGD, seconds for a sample", 1 / local, 1 / alone, "the fastest alone", 1 / 1.1),
    ]


def _slow_network(steps: int) -> list[Bar]:
    if (problem := missing()) is not None:
        print(f"{problem}; a slow network is not measured\n")
        return []
    others = OtherLoad()
    with tempfile.TemporaryDirectory() as folder, shaped_link(_RATE) as link:
        envs = [_rank(link, rank) for rank in range(2)]
        found = _together(Path(folder), ["gpt", str(steps)], envs, [link.command(rank) for rank in range(2)])
    print(f"\nGPT of {found['parameters'] / 1e6:.1f} million parameters, two ranks, {_RATE}; others used "
          f"{others.cores():.1f} cores")  # fmt: skip
    loss = found["loss"]
    for name in ("sync", "local"):
        print(f"{name:<34}{found[name]['samples_per_s']:>12.1f} samples/s   validation loss {loss[name]:.4f}")
    print(f"after {steps} steps the losses differ by {100 * (loss['ratio'] - 1):+.2f} % (standard error "
          f"{100 * loss['error']:.2f} %)")  # fmt: skip
    sync, local = found["sync"], found["local"]
    return [
        Bar("GPT over 1 Gbit/s: local SGD, seconds for a sample", 1 / local["samples_per_s"],
            1 / sync["samples_per_s"], "synchronous DDP", 1 / 3),
        Bar("GPT over 1 Gbit/s: its validation loss", loss["local"], loss["sync"], "synchronous DDP's", 1.01),
    ]  # fmt: skip


def _rank(link: Shaped, rank: int) -> dict[str, str]:
    return {
        **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": link.addresses[0]},
        **{"MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": link.interface, "OMP_NUM_THREADS": "1"},
        **{"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "UGRO_NODE": f"rank{rank}"},
    }


def _together(folder: Path, words: list[str], envs: list[dict[str, str]], prefixes: list[list[str]]) -> dict[str, Any]:
    return together([[*prefix, sys.executable, "-m", "bench.local_rank", *words] for prefix in prefixes], envs, folder)
