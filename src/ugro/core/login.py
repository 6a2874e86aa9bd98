"""A login: a node as one person reaches it, named like ``ann@gpu1``; without accounts of persons, the node itself.

What is started, sent or fetched goes through the login that a job was placed on. Devices, health and labels belong to
the node, not to its logins.
"""

from __future__ import annotations

USER = "{user}"  # in an account or a folder of the configuration: the person's name


def login_name(account: str, node: str) -> str:
    return f"{account}@{node}"


def node_of(login: str) -> str:
    """No node has ``@`` in its name; an account may."""
    return login.rpartition("@")[2]


def account_of(login: str) -> str:
    """Empty for the node itself."""
    return login.rpartition("@")[0]
