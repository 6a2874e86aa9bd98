"""How a Python says what its torch was built for: source of functions, for a process of that Python.

Package metadata does not tell a build for CPUs from one for CUDA, if it is not from PyTorch's own index: conda's have
the same version, and bring NCCL as a package of conda. Files are read: to import torch takes seconds, and may touch the
GPUs.
"""

from __future__ import annotations

SOURCE = r"""
import os, re, sys
from importlib import metadata

def torch_says():
    try:
        file = metadata.distribution("torch").locate_file("torch/version.py")
        with open(str(file), encoding="utf-8", errors="replace") as source:
            return source.read()
    except (metadata.PackageNotFoundError, OSError):
        return ""

def built_with(key):
    found = re.search(r"^%s\b[^=\n]*=\s*['\"](.+?)['\"]" % key, torch_says(), re.MULTILINE)
    return found.group(1) if found else None

def torch_cuda():
    if not re.search(r"^cuda\b[^=\n]*=\s*None\b", torch_says(), re.MULTILINE):
        return built_with("cuda")
    rocm = ".".join((built_with("hip") or "").split(".")[:2])
    return "none (%s)" % ("rocm" + rocm if rocm else "xpu" if built_with("xpu") else "cpu")

def conda_nccl():
    try:
        names = os.listdir(os.path.join(sys.prefix, "conda-meta"))
    except OSError:
        return None
    # Three numbers are NCCL's own; conda adds one.
    found = [re.match(r"nccl-([0-9]+\.[0-9]+\.[0-9]+)[.0-9]*-[^-]+\.json$", name) for name in names]
    return next((one.group(1) for one in found if one), None)
"""
