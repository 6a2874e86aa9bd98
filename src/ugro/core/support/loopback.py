"""Whether only this machine reaches an address."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """A name other than localhost may be anybody's, whatever it begins with."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
