"""UGRO turns a handful of unequal machines reached by SSH into one training cluster.

``ugro.Client`` is the typed Python API, ``ugro.RemoteClient`` the same for an agent on another machine, ``ugro.Pool``
maps a function over many items. Importing this package costs milliseconds and touches nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Client", "Pool", "RemoteClient", "__version__"]

if TYPE_CHECKING:
    from ugro.client.client import Client
    from ugro.features.batches.pool import Pool
    from ugro.features.remote_access.client.agent import RemoteClient


def __getattr__(name: str) -> Any:
    if name == "Client":
        from ugro.client.client import Client

        return Client
    if name == "RemoteClient":
        from ugro.features.remote_access.client.agent import RemoteClient

        return RemoteClient
    if name == "Pool":
        from ugro.features.batches.pool import Pool

        return Pool
    raise AttributeError(f"module 'ugro' has no attribute {name!r}")
