"""Whether what a user leaves running outlives the login; imports little, since every start of a run asks."""

from __future__ import annotations

import os

from ugro.remote.identity import user_name

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any, Dict, List

_CONFIG_FOLDERS = ("usr/lib", "usr/local/lib", "run", "etc")  # the last one wins


def survival(prefix: str = "/") -> Dict[str, Any]:
    """Whether logind ends what a user left running; ``prefix`` is where the system's files are."""
    user = user_name(os.getuid())
    settings = _logind_settings(prefix)
    is_listed = not settings.get("KillOnlyUsers", "").split() or user in settings["KillOnlyUsers"].split()
    is_excluded = user in settings.get("KillExcludeUsers", "root").split()
    is_on = settings.get("KillUserProcesses", "no").lower() in ("yes", "y", "true", "t", "on", "1")
    return {
        "user": user,
        "has_logind": os.path.isdir(os.path.join(prefix, "run/systemd/system")),
        "kills_processes": is_on and is_listed and not is_excluded,
        "lingers": os.path.exists(os.path.join(prefix, "var/lib/systemd/linger", user)),
    }


def has_user_manager(prefix: str = "/") -> bool:
    """Whether this user's systemd runs, and can be asked for a scope."""
    if not os.path.isdir(os.path.join(prefix, "run/user/%d/systemd" % os.getuid())):
        return False
    import shutil  # brings much with it, and most machines do not come this far

    return shutil.which("systemd-run") is not None


def _logind_settings(prefix: str) -> Dict[str, str]:
    settings: Dict[str, str] = {}
    for path in _logind_files(prefix):
        section = ""
        for line in _lines(path):
            line = line.strip()
            if line.startswith("["):
                section = line
            elif section == "[Login]" and "=" in line and line[0] not in "#;":
                key, _, value = line.partition("=")
                settings[key.strip()] = value.strip()
    return settings


def _logind_files(prefix: str) -> List[str]:
    """In the order in which later ones win: one main file, then the drop-ins by name, wherever they are."""
    folders = [os.path.join(prefix, folder, "systemd") for folder in _CONFIG_FOLDERS]
    mains = [path for path in (os.path.join(folder, "logind.conf") for folder in folders) if os.path.exists(path)]
    drop_ins: Dict[str, str] = {}
    for folder in (os.path.join(folder, "logind.conf.d") for folder in folders):
        if os.path.isdir(folder):
            drop_ins.update((name, os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".conf"))
    return mains[-1:] + [drop_ins[name] for name in sorted(drop_ins)]


def _lines(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(64 * 1024).splitlines()
    except OSError:
        return []
