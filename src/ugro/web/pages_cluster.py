"""``/``: the cluster at a glance; ``/nodes/{name}``: one node, with its last day."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from ugro.web.site import Site


def add_cluster_pages(app: FastAPI, site: Site) -> None:
    @app.get("/")
    async def cluster(request: Request) -> Response:
        return await site.render(request, "cluster.html", cli="ugro health")

    @app.get("/nodes/{name}")
    async def node(request: Request, name: str) -> Response:
        site.agent.cluster.inventory.get(name)
        return await site.render(request, "node.html", cli=f"ugro node show {name}", name=name)
