"""What a host is made of: a short text that is its job's command, and an archive that its pool sends.

The job's working directory is the user's, as with every job, so that the modules of a function are found there; our own
code goes beside it.
"""

from __future__ import annotations

import functools
import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

import ugro

SOCKET = "pool/host"  # in the run directory
_PARTS = ("batch", "core")  # of this package

# Listens, says who it is, and receives the archive; all else is in that. As short as can be: users see it in `ps`.
BOOT = """\
import json, os, socket, struct, sys
folder = os.path.join(os.environ["UGRO_RUN_DIR"], "pool")
os.makedirs(folder, 0o700)
listener = socket.socket(socket.AF_UNIX)
listener.bind("/proc/self/fd/%d/host" % os.open(folder, os.O_RDONLY))
listener.listen(8)
listener.settimeout(float(os.environ.get("UGRO_POOL_PATIENCE_S", "300")))
hello = json.dumps({"python": sys.version_info[:2], "has_code": False}).encode()
code, wanted = b"", -1
while len(code) != wanted:
    try:
        connection, _ = listener.accept()
    except socket.timeout:
        print("no pool has connected")
        sys.exit()
    connection.settimeout(60)
    with connection, connection.makefile("rb") as stream:
        try:
            connection.sendall(struct.pack("<IQ", 1, len(hello)) + hello)
            _, size, wanted = struct.unpack("<IQQ", stream.read(20))
            code = stream.read(size + wanted)[size:]
        except (OSError, struct.error):
            pass
with open(os.path.join(folder, "code.zip"), "wb") as file:
    file.write(code)
sys.path.insert(0, file.name)
from ugro.batch.jobs.host import main
main(listener, folder)
"""


@functools.cache
def archive() -> bytes:
    """Of UGRO what a host and its slots need, and cloudpickle, which is Python alone."""
    root = Path(ugro.__file__).parent
    files = [root / "__init__.py", *(file for part in _PARTS for file in sorted((root / part).rglob("*.py")))]
    found = {f"ugro/{file.relative_to(root)}": file for file in files}
    package = Path(str(getattr(find_spec("cloudpickle"), "origin", ""))).parent
    found |= {f"cloudpickle/{file.name}": file for file in sorted(package.glob("*.py"))}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as target:
        for name, file in found.items():
            target.write(file, name)
    return content.getvalue()
