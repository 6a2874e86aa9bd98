"""A certificate of a test's own, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> Path:
    """``cert.pem``, for 127.0.0.1; its key is ``key.pem`` beside it."""
    making = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    making += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-days", "2"]
    making += ["-subj", "/CN=ugro test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(making, check=True, capture_output=True, timeout=60)
    return folder / "cert.pem"
