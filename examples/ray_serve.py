"""Deploys an application of Ray Serve on a Ray cluster of UGRO. It stays there until the cluster is stopped.

    ugro cluster start --nodes 3 --package "ray[default,serve]"
    eval "$(ugro cluster env)"
    python examples/ray_serve.py --address ray://HOST:10001      # as `ugro cluster status` prints it
    curl -d hello http://HOST:8000/                              # {"said":"olleh"}

Without --address it runs on a node of the cluster. Serve asks nobody for a key: --host 0.0.0.0 lets all machines in.
"""

from __future__ import annotations

import argparse

import ray
from ray import serve
from starlette.requests import Request


class Turned:
    async def __call__(self, request: Request) -> dict[str, str]:
        return {"said": (await request.body()).decode()[::-1]}


def application(replicas: int) -> serve.Application:
    return serve.deployment(Turned).options(num_replicas=replicas).bind()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of the cluster: ray://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="where Serve listens on the cluster's head")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2)
    given = parser.parse_args()
    ray.init(given.address)
    serve.start(proxy_location="HeadOnly", http_options={"host": given.host, "port": given.port})
    serve.run(application(given.replicas))
    print(f"ready at port {given.port} of the head")


if __name__ == "__main__":
    main()
