"""Which uv is used: one version, and for each platform the SHA-256 of its wheel on PyPI."""

from __future__ import annotations

from dataclasses import dataclass

UV_VERSION = "0.13.8"


@dataclass(frozen=True, slots=True)
class UvWheel:
    tag: str  # the platform, as pip names it
    sha256: str


# By architecture and C library, as nodes name them.
UV_WHEELS = {
    ("x86_64", "glibc"): UvWheel(
        "manylinux_2_17_x86_64", "e18a57b8b352eb7c8feb317b9f6f533c8f0ad9673fd6cf34bbe3cf1a9f6a8984"
    ),
    ("x86_64", "musl"): UvWheel(
        "musllinux_1_1_x86_64", "29451c60f5e8b07403e0a175d5229efc36b0289b34143ff4aaa499a5dd52553a"
    ),
    ("aarch64", "glibc"): UvWheel(
        "manylinux_2_17_aarch64", "0b3e8b1a4f5e405e31e2ff33de8af4744831e9f7338539671efbd8c3c94e791d"
    ),
    ("aarch64", "musl"): UvWheel(
        "musllinux_1_1_aarch64", "0b3e8b1a4f5e405e31e2ff33de8af4744831e9f7338539671efbd8c3c94e791d"
    ),
}
