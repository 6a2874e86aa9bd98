"""What nodes are, as far as environments depend on it, and whether they reach an index. Asked once for each link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ugro.core.errors import EnvFailed
from ugro.core.python_env import EnvHost
from ugro.nodes.link import Link
from ugro.nodes.python_envs import PythonEnvs
from ugro.policy.python_env.naming import common_python, pythons_of


@dataclass(frozen=True, slots=True)
class _Known:
    link: Link | None
    host: EnvHost
    reaches: dict[str, bool]


class Hosts:
    def __init__(self, envs: Callable[[str], PythonEnvs]) -> None:
        self._envs = envs
        self._known: dict[str, _Known] = {}

    async def of(self, node: str) -> EnvHost:
        return (await self._asked(node, ())).host

    async def reaches(self, node: str, addresses: tuple[str, ...]) -> bool:
        """Whether it reaches all of them; they hold no passwords."""
        known = await self._asked(node, addresses)
        return all(known.reaches[address] for address in addresses)

    def common_python(self, hosts: Mapping[str, EnvHost]) -> str:
        """The version for all of them. Raises EnvFailed, and asks them again the next time: one may be installed."""
        found = common_python(hosts)
        if found is None:
            self.forget(hosts)
            text = f"the nodes have no version of Python in common: {pythons_of(hosts)}"
            hint = 'name one in the job file: environment: {python: "3.11"}'
            raise EnvFailed(text, hint=hint, cause="python-missing")
        return found

    def forget(self, nodes: Iterable[str]) -> None:
        """Something was not as it was known: they are asked again."""
        for node in nodes:
            self._known.pop(node, None)

    async def _asked(self, node: str, addresses: tuple[str, ...]) -> _Known:
        envs = self._envs(node)
        known = self._known.get(node)
        if known is not None and (known.link is None or known.link is not envs.node.link):
            known = None
        new = tuple(address for address in addresses if known is None or address not in known.reaches)
        if known is not None and not new:
            return known
        found = await envs.about(new, with_pythons=known is None)
        host, before = (known.host, known.reaches) if known is not None else (replace(found, reaches=()), {})
        reaches = {**before, **dict(zip(new, found.reaches, strict=True))}
        known = self._known[node] = _Known(envs.node.link, host, reaches)
        return known
