"""Whether the node may have GPUs at all. Must be cheap: it is asked while a link opens."""

from __future__ import annotations

import os

_DEVICES = ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/kfd", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_TOOLS = ("nvidia-smi", "amd-smi", "rocm-smi")


def has_gpu_hint() -> bool:
    if os.environ.get("UGRO_NVML_LIBRARY") or any(os.path.exists(path) for path in _DEVICES):
        return True
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return any(os.access(os.path.join(folder, tool), os.X_OK) for folder in folders for tool in _TOOLS)
