from __future__ import annotations

import socket
from dataclasses import asdict

from ugro.features.services.model import Probe, Probes
from ugro.features.services.node.probing import Prober


def test_a_prober_that_was_stopped_says_nothing_about_the_next_server() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        probes = Probes(start=Probe("/health", timeout_s=60.0))
        place = ("127.0.0.1", int(silent.getsockname()[1]))
        prober = Prober(asdict(probes), place, lambda state, reason: said.append(state), said.append)
        prober.start()
        with silent.accept()[0]:  # it has asked, and waits for an answer
            prober.stop()
        prober.join(60)
    assert (said, prober.is_alive()) == ([], False)
