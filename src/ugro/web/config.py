"""``dashboard`` in the cluster file."""

from __future__ import annotations

from ugro.kernel.config.kinds import Bool, ListOf, Whole
from ugro.kernel.config.section import HOST, LOCAL_PATH, Section, key, section


@section
class Dashboard(Section):
    """The web page that the agent serves. To open it, use a link from `ugro dashboard`, or the token."""

    enabled: bool = key(True, Bool(), "Whether the agent serves the dashboard.")
    host: str = key(
        "127.0.0.1", HOST, "The address to listen on; 0.0.0.0 is all addresses, and warns if there is no TLS."
    )
    port: int = key(8099, Whole(1, 65535), "The port to listen on; another one if it is taken.")
    names: tuple[str, ...] = key(
        (),
        ListOf("a list of host names such as [gpu-master.lan]", HOST),
        "Host names under which browsers may call the dashboard, besides its own address.",
        example=("lab.lan",),
    )
    launch: bool | None = key(
        None,
        Bool(),
        "Whether browsers may launch a job again with changes. Null is true if `host` is a loopback address, else "
        "false.",
        example=True,
    )
    certificate_file: str | None = key(
        None, LOCAL_PATH, "A TLS certificate (PEM); with it, the dashboard is https.", example="~/.ugro/cert.pem"
    )
    key_file: str | None = key(
        None, LOCAL_PATH, "The certificate's private key, if it is in another file.", example="~/.ugro/key.pem"
    )
