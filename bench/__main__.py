"""``make bench``: every claim as a ratio against a peer measured in the same run. Exit code 1 if a bar is missed.

``python -m bench jobs launch`` measures only these parts.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable

from bench.bars import Bar


def main() -> None:
    arguments = _arguments()
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, all on loopback\n")
    bars: list[Bar] = []
    for part in arguments.parts or _PARTS:
        print(f"## {part}\n", flush=True)
        bars += _PARTS[part](arguments)
    for bar in bars:
        print(bar.line())
    sys.exit(0 if all(bar.is_met for bar in bars) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("parts", nargs="*", help=f"which of {', '.join(_PARTS)}; default: all")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 50, 100], help="of the ssh part")
    parser.add_argument("--warm-repeats", type=int, default=30, help="of the ssh part")
    parser.add_argument("--cold-repeats", type=int, default=3, help="of the ssh part")
    parser.add_argument("--jobs", type=int, default=1000, help="how many jobs are run at once")
    parser.add_argument("--queue", type=int, help="of the jobs part: how many jobs wait at once, instead of the peers")
    parser.add_argument("--rounds", type=int, default=3, help="how often all are measured in turn")
    parser.add_argument("--steps", type=int, default=40, help="of each training: balance, local, pipeline, plan")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in _PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(_PARTS)}")
    return arguments


# Each part imports what it needs: one can be measured where another's peers are not installed.
def _ssh(arguments: argparse.Namespace) -> list[Bar]:
    from bench import ssh

    return ssh.measure(
        arguments.nodes, warm_repeats=arguments.warm_repeats, cold_repeats=arguments.cold_repeats
    )


def _jobs(arguments: argparse.Namespace) -> list[Bar]:
    from bench import jobs, long_queue

    if arguments.queue:
        return long_queue.measure(arguments.queue)
    return jobs.measure(arguments.jobs, arguments.rounds)


def _launch(arguments: argparse.Namespace) -> list[Bar]:
    from bench import launch

    return launch.measure(arguments.rounds)


def _adoption(arguments: argparse.Namespace) -> list[Bar]:
    from bench import adoption

    return adoption.measure(arguments.rounds)


def _balance(arguments: argparse.Namespace) -> list[Bar]:
    from bench import balance

    return balance.measure(arguments.steps, min(arguments.rounds, 2))


def _local(arguments: argparse.Namespace) -> list[Bar]:
    from bench import local

    return local.measure(arguments.steps)


def _pipeline(arguments: argparse.Namespace) -> list[Bar]:
    from bench import pipeline

    return pipeline.measure(arguments.steps, min(arguments.rounds, 2))


def _plan(arguments: argparse.Namespace) -> list[Bar]:
    from bench import plan

    return plan.measure(arguments.steps, arguments.rounds)


def _scheduler(arguments: argparse.Namespace) -> list[Bar]:
    from bench import scheduler

    print(scheduler.measure() + "\n")
    return []


def _store(arguments: argparse.Namespace) -> list[Bar]:
    from bench import store

    return store.measure(arguments.rounds)


def _metrics(arguments: argparse.Namespace) -> list[Bar]:
    from bench import metrics

    return metrics.measure()


def _curves(arguments: argparse.Namespace) -> list[Bar]:
    from bench import curves

    return curves.measure()


def _sync(arguments: argparse.Namespace) -> list[Bar]:
    from bench import sync

    return sync.measure(arguments.rounds)


def _dashboard(arguments: argparse.Namespace) -> list[Bar]:
    from bench import dashboard

    return dashboard.measure(arguments.rounds)


def _environments(arguments: argparse.Namespace) -> list[Bar]:
    from bench import environments

    return environments.measure(arguments.rounds)


def _ray(arguments: argparse.Namespace) -> list[Bar]:
    from bench import ray_cluster

    return ray_cluster.measure(arguments.rounds)


def _batch(arguments: argparse.Namespace) -> list[Bar]:
    from bench import batch

    return batch.measure(arguments.rounds)


def _serve(arguments: argparse.Namespace) -> list[Bar]:
    from bench import serve

    return serve.measure(arguments.rounds)


def _sweep(arguments: argparse.Namespace) -> list[Bar]:
    from bench import sweep

    return sweep.measure(arguments.rounds)


def _inference(arguments: argparse.Namespace) -> list[Bar]:
    from bench import inference

    return inference.measure(arguments.rounds)


_PARTS: dict[str, Callable[[argparse.Namespace], list[Bar]]] = {
    "jobs": _jobs,
    "launch": _launch,
    "adoption": _adoption,
    "balance": _balance,
    "local": _local,
    "pipeline": _pipeline,
    "plan": _plan,
    "scheduler": _scheduler,
    "store": _store,
    "metrics": _metrics,
    "curves": _curves,
    "dashboard": _dashboard,
    "ssh": _ssh,
    "sync": _sync,
    "env": _environments,
    "ray": _ray,
    "batch": _batch,
    "serve": _serve,
    "sweep": _sweep,
    "inference": _inference,
}


if __name__ == "__main__":
    main()
