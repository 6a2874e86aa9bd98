"""``/hardware``: what was measured of all nodes, and the links between them."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from ugro.web.site import Site
from ugro.web.views import hardware


def add_hardware_pages(app: FastAPI, site: Site) -> None:
    @app.get("/hardware")
    async def page(request: Request) -> Response:
        agent = site.agent
        members = [node.spec.name for node in agent.cluster.inventory]
        latest = {name: figures for name, figures in agent.measured.latest.items() if name in members}
        store = agent.store.hardware
        return await site.render(
            request,
            "hardware.html",
            cli="ugro node bench --quick",
            nodes=hardware.bars(latest),
            missing=[name for name in members if name not in latest],
            findings=[finding for name in members for finding in agent.measured.findings(name)],
            matrix=hardware.matrix(members, await store.links(set(members))),
            allreduces=[one for one in await store.allreduces() if set(one.nodes) <= set(members)],
            allreduce_text=hardware.allreduce_text,
        )
