"""The sources that a configuration names."""

from __future__ import annotations

from pathlib import Path

from ugro.config.schema import Config
from ugro.nodes.discovery.command import CommandSource
from ugro.nodes.discovery.consul import ConsulSource
from ugro.nodes.discovery.mdns import MdnsSource
from ugro.nodes.discovery.source import Source
from ugro.nodes.discovery.ssh_config import SshConfigSource
from ugro.nodes.discovery.zookeeper import ZooKeeperSource

_SSH_CONFIG = "~/.ssh/config"


def sources_of(config: Config, ssh_config: str | None) -> tuple[Source, ...]:
    """Equal settings give equal sources. ``ssh_config``: a file to use instead of the one that is configured."""
    section = config.discovery
    found: list[Source] = []
    if section.ssh_config:
        file = (ssh_config or config.ssh.config_file) if config.ssh.config_file else _SSH_CONFIG
        found.append(SshConfigSource(Path(file or _SSH_CONFIG), section.ssh_config, section.interval))
    if section.mdns:
        found.append(MdnsSource(section.mdns))
    if (zookeeper := section.zookeeper) is not None:
        found.append(ZooKeeperSource(zookeeper.hosts, zookeeper.path, section.timeout, section.accept_users))
    if (consul := section.consul) is not None:
        found.append(
            ConsulSource(
                consul.url, consul.service, section.timeout, consul.tag, consul.token_env, consul.token_file
            )
        )
    if section.command:
        folder = config.path.absolute().parent if config.path else Path.home()
        found.append(CommandSource(section.command, folder, section.interval, section.timeout))
    return tuple(found)
