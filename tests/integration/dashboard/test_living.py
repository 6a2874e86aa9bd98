"""The dashboard as a place to stay, in a real browser: GPUs, activity, questions before acts, outputs."""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, contexts, dashboards, is_live
from ugro.kernel.jobs.model import JobState
from ugro.kernel.jobs.operations import CancelJob
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: a C compiler")
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_STRANGER = 1  # the process 1 is nobody's job


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """Of a node with GPUs, the last of which somebody else uses, and of one without."""
    folder = tmp_path_factory.mktemp("gpus")
    gpus = [SimulatedGpu(temperature_c=50 + index) for index in range(11)]
    write_gpus(folder / "gpus", [*gpus, SimulatedGpu(processes=((_STRANGER, 1 << 30),))])
    env = f"env: {{UGRO_NVML_LIBRARY: {build_nvml_stub(folder)}, UGRO_PRETEND_GPUS: {folder}/gpus}}"
    nodes = f"  big: {{transport: local, remote_root: '%(home)s/big', {env}}}\n"
    nodes += "  small: {transport: local, remote_root: '%(home)s/small'}\n"
    with dashboards("nodes:\n" + nodes) as found:
        found.client.health()
        yield found


def test_every_gpu_has_a_tile_and_a_job_stands_beside_its_own_until_it_ends(dashboard: Dashboard, page: Page) -> None:
    is_live(page)
    tiles = page.locator("[data-part=gpus] li.gpu")
    expect(tiles).to_have_count(13)
    assert tiles.locator(".gpu-name a").all_inner_texts() == [*(f"big {index}" for index in range(12)), "small"]
    expect(tiles.nth(2)).to_contain_text("52 °C · 15 W")
    expect(tiles.nth(11)).to_contain_text("1 other process")
    expect(tiles.nth(11)).to_contain_text("other use")
    expect(tiles.nth(12)).to_contain_text("CPU")

    job = dashboard.submit("holds-two", "sleep", "600", gpus_per_node=2, cpus=0)
    mine = tiles.filter(has=page.get_by_role("link", name=f"{job} holds-two"))
    expect(mine).to_have_count(2)
    expect(mine.first).to_contain_text("● running")
    dashboard.client.ask(CancelJob(str(job)))
    expect(mine).to_have_count(0)
    expect(page.locator("[data-part=gpus] header")).to_contain_text("11 of 12 free")


def test_a_burst_of_jobs_is_one_line_and_a_job_another_that_unfolds(dashboard: Dashboard, page: Page) -> None:
    burst = [{"command": ["true"], "cpus": 0, "sync": False, "name": f"eval-{number}"} for number in range(8)]
    jobs = dashboard.client.jobs.submit_many(burst)
    bad = dashboard.submit("bad", "sh", "-c", "exit 3", cpus=0)
    for job in (*(one.id for one in jobs), bad):
        dashboard.client.jobs.wait(job)
    lines = page.locator(".activity > li")
    expect(lines.filter(has_text="8 jobs of eval")).to_contain_text("8 succeeded")
    line = lines.filter(has=page.get_by_role("link", name=f"job {bad} bad"))
    expect(line).to_have_count(1)
    expect(line).to_contain_text("failed")
    line.locator("summary").click()
    expect(line.locator("details li").filter(has_text="submitted by")).to_be_visible()


def test_a_question_names_the_act_and_escape_changes_nothing(dashboard: Dashboard, page: Page) -> None:
    job = dashboard.submit("kept", "sleep", "600", cpus=0)
    page.goto(f"{dashboard.url}/jobs/{job}")
    is_live(page)
    button = page.get_by_role("button", name="Cancel", exact=True)
    button.click()
    question = page.get_by_role("dialog", name=f"Cancel job {job}?")
    expect(question.get_by_role("button")).to_have_text(["Keep running", f"Cancel job {job}"])
    expect(question.get_by_role("button", name="Keep running")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_have_count(0)
    assert dashboard.client.jobs.get(job).ending is None
    button.click()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#why .status")).to_contain_text("cancelled")
    assert dashboard.client.jobs.get(job).state is JobState.CANCELLED


@pytest.mark.proof
@pytest.mark.parametrize(("theme", "width"), [("light", 390), ("dark", 1280)])
def test_everybody_can_read_the_grid(dashboard: Dashboard, browser: Browser, theme: str, width: int) -> None:
    job = dashboard.submit("a-name-that-is-rather-long-for-a-tile", "sleep", "600", gpus_per_node=1, cpus=0)
    with contexts(browser, color_scheme=theme, viewport={"width": width, "height": 900}) as context:
        page = dashboard.sign_in(context)
        is_live(page)
        expect(page.locator("[data-part=gpus]").get_by_role("link", name=re.compile(f"^{job} "))).to_be_visible()
        assert accessibility_problems(page) == []
        assert page.evaluate(_OVERFLOW) <= 0
    dashboard.client.ask(CancelJob(str(job)))


# --- outputs ------------------------------------------------------------------------------------------------------

_PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a PNG
)
_EVIL = "<script>document.title='owned'</script><svg onload=\"document.title='owned'\"><b>bold</b></svg>"
_WRITER = f"""\
import base64, os
os.chdir(os.environ["UGRO_OUTPUT"])
def write(name, content):
    with open(name, "wb") as file:
        file.write(content)
write("picture.png", base64.b64decode("{_PIXEL}"))
for name in ("evil.html", "evil.svg", "evil.png"):
    write(name, {_EVIL!r}.encode())
write("table.csv", b"step,loss\\n1,0.5\\n2,0.25\\n")
write("values.json", b'{{"a": {{"b": [1, 2]}}}}')
write("large.txt", b"line\\n" * 100_000)
write("model.bin", bytes(5000))
write(b"odd \\xff\\nname.txt", b"found")
os.symlink("/etc/passwd", "link")
"""


@pytest.fixture(scope="module")
def written(dashboard: Dashboard) -> int:
    """The number of a job that has written files of many kinds."""
    job = dashboard.submit("writer", "python3", "-c", _WRITER, cpus=0)
    assert dashboard.client.jobs.wait(job).state is JobState.SUCCEEDED
    return job


def test_outputs_are_previewed_by_their_content(dashboard: Dashboard, page: Page, written: int) -> None:
    page.goto(f"{dashboard.url}/jobs/{written}")
    files = page.locator("#outputs .files")
    shown = page.get_by_role("dialog")
    files.get_by_role("link", name="picture.png", exact=True).click()
    expect(shown.get_by_role("img")).to_have_js_property("naturalWidth", 1)
    page.keyboard.press("Escape")
    files.get_by_role("link", name="table.csv", exact=True).click()
    expect(shown.get_by_role("cell")).to_have_text(["1", "0.5", "2", "0.25"])
    page.keyboard.press("Escape")
    files.get_by_role("link", name="values.json", exact=True).click()
    expect(shown.locator("pre")).to_contain_text('"b": [')
    page.keyboard.press("Escape")
    expect(files.get_by_role("link", name="values.json", exact=True)).to_be_focused()
    files.get_by_role("link", name=r"odd \xff\nname.txt", exact=True).click()
    expect(shown.locator("pre")).to_have_text("found")
    shown.get_by_role("link", name="Open as a page").click()
    expect(page.locator("#preview pre")).to_have_text("found")
    page.goto(f"{dashboard.url}/jobs/{written}/file?name=large.txt")
    expect(page.locator("#preview")).to_contain_text("of the first 256.0 KiB of 488.3 KiB")
    page.goto(f"{dashboard.url}/jobs/{written}/file?name=model.bin")
    expect(page.locator("#preview")).to_contain_text("no preview")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.path().read_bytes() == bytes(5000)


def test_a_hostile_output_is_text_and_its_download_runs_nothing(dashboard: Dashboard, page: Page, written: int) -> None:
    for name in ("evil.html", "evil.svg", "evil.png"):
        page.goto(f"{dashboard.url}/jobs/{written}/file?name={name}")
        expect(page.locator("#preview pre")).to_have_text(_EVIL)
        expect(page.locator("#preview").locator("b, svg, script, img")).to_have_count(0)
        assert "owned" not in page.title()
        raw = page.request.get(f"{dashboard.url}/jobs/{written}/file/raw?name={name}")
        assert raw.headers["content-type"] == "application/octet-stream"
        assert raw.headers["content-disposition"].startswith("attachment;")
        assert raw.headers["content-security-policy"] == "default-src 'none'; sandbox"
        assert raw.headers["x-content-type-options"] == "nosniff"
        assert page.request.get(f"{dashboard.url}/jobs/{written}/file/image?name={name}").status == 404
    image = page.request.get(f"{dashboard.url}/jobs/{written}/file/image?name=picture.png")
    assert image.headers["content-type"] == "image/png"
    assert "sandbox" in image.headers["content-security-policy"]


def test_no_name_leads_out_of_the_folder(dashboard: Dashboard, page: Page, written: int) -> None:
    names = ("../config.json", "..%2F..%2F..%2Fdashboard.token", "link", "/etc/passwd", "%00", "no-such")
    paths = [f"/jobs/{written}/{route}?name={name}" for route in ("file", "file/raw", "file/image") for name in names]
    assert {path: page.request.get(dashboard.url + path).status for path in paths} == dict.fromkeys(paths, 404)


def test_all_outputs_come_as_one_archive(dashboard: Dashboard, page: Page, written: int) -> None:
    answer = page.request.get(f"{dashboard.url}/jobs/{written}/outputs.tar")
    assert answer.headers["content-disposition"].startswith(f'attachment; filename="job-{written}-writer.tar"')
    with tarfile.open(fileobj=io.BytesIO(answer.body())) as found:
        names = {os.fsencode(one.name).removeprefix(b"job-%d/" % written) for one in found.getmembers()}
    assert names >= {b"picture.png", b"evil.html", b"odd \xff\nname.txt", b"config.json", b"logs/rank_0.log"}
    assert b"link" not in names


def test_what_was_left_on_the_node_is_named_with_its_reason_and_the_command(dashboard: Dashboard, page: Page) -> None:
    script = "head -c 9000 /dev/zero > $UGRO_OUTPUT/'big [1].bin'; echo small > $UGRO_OUTPUT/small.txt"
    job = dashboard.submit("leaves", "sh", "-c", script, cpus=0, result_limit="1KB")
    dashboard.client.jobs.wait(job)
    page.goto(f"{dashboard.url}/jobs/{job}")
    left = page.locator("#outputs .left")
    expect(left.locator("summary")).to_have_text(re.compile("^1 file, 8.8 KiB, left on (big|small)$"))
    left.locator("summary").click()
    expect(left).to_contain_text("big [1].bin")
    command = left.get_by_role("button", name="Copy the command that fetches big [1].bin")
    expect(command).to_have_attribute("data-copy", f"ugro results {job} --fetch 'big [[]1].bin'")
    expect(left.get_by_role("cell").nth(2)).to_contain_text("limit")


def test_ranks_that_only_measure_their_steps_have_a_last_step(dashboard: Dashboard, page: Page) -> None:
    record = '{"kind": "profile", "step": 41, "rank": 0, "values": {"step_s": 0.1}}'
    job = dashboard.submit("measured", "sh", "-c", f"echo '{record}' > $UGRO_OUTPUT/metrics.jsonl", cpus=0)
    dashboard.client.jobs.wait(job)
    page.goto(f"{dashboard.url}/jobs/{job}")
    expect(page.locator("#ranks tbody tr")).to_contain_text("41")
    expect(page.locator("#curves")).to_be_hidden()
