"""The section `ray` of the cluster file."""

from __future__ import annotations

from ugro.kernel.config.kinds import Bool, Choice, Whole
from ugro.kernel.config.section import LINE, Section, key, section


@section
class RaySection(Section):
    """Settings for Ray clusters (`ugro cluster start`)."""

    dashboard_port: int = key(
        8265,
        Whole(1, 65535),
        "The port of Ray's dashboard on the head node. If you do not set it and it is taken, the next free one is "
        "used.",
    )
    redis_port: int = key(
        6379,
        Whole(1, 65535),
        "The port at which the head node accepts the other nodes. If you do not set it and it is taken, the next free "
        "one is used.",
    )
    client_port: int = key(
        10001,
        Whole(1, 65535),
        "The port of Ray Client on the head node: `ray.init(\"ray://HOST:10001\")`. If you do not set it and it is "
        "taken, the next free one is used.",
    )
    head_bind_all: bool = key(
        False,
        Bool(),
        "Whether Ray's dashboard listens on all addresses of the head node, or on loopback only. It wants the "
        "cluster's token in any case. Ray's other ports listen on all addresses.",
    )
    namespace: str = key(
        "default",
        LINE,
        "The Ray namespace that `ugro cluster env` names in `RAY_NAMESPACE`. Ray uses it by itself for addresses that "
        "begin with `ray://`; elsewhere: `ray.init(namespace=os.environ[\"RAY_NAMESPACE\"])`.",
    )
    log_level: str = key(
        "info", Choice(("debug", "info", "warning", "error", "critical")), "How much Ray writes to its logs."
    )
