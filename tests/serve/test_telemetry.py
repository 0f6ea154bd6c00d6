"""Nothing is written and nobody is called behind the user's back: onnxruntime's telemetry is off.

Every part runs in a process of its own, in an empty network namespace where that is permitted, with
an empty home. onnxruntime opens its event store and starts its thread when it is imported, so a few
moments show whether it is on.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serve.made import write_export

WATCH = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
{code}
links = []
for fd in os.listdir("/proc/self/fd"):
    try:
        links.append(os.readlink("/proc/self/fd/" + fd))
    except OSError:
        pass
sockets = [l for l in links if l.startswith("socket:")]
resolver = Path("/proc/self/maps").read_text().count("libnss_dns")
print(json.dumps({{"sockets": sockets, "resolver": resolver}}))
"""
PARTS = {
    "the client": "from splitveil.serve import Client\nimport numpy as np\n"
    "Client(folder, 'http://127.0.0.1:1', threads=1).send(np.zeros((1, 1, 2, 3), np.float32))",
    "the server and its page": "from splitveil.serve.server import load_app\n"
    "load_app(folder, threads=1)",
    "the export": "from splitveil.serve import export\n"
    "export.onnx_versions(), export.onnxruntime_quantisation()",
}
NAMESPACE = ["unshare", "-rn"]
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "OMP_NUM_THREADS")
REAL = "import onnxruntime"  # as any program imports it


def empty_namespace() -> list[str]:
    """The words before a command that give it a network without anybody."""
    if shutil.which("unshare") and subprocess.run(
        [*NAMESPACE, "true"], capture_output=True, check=False
    ).returncode == 0:  # fmt: skip
        return NAMESPACE
    return []


def traces(code: str, folder: Path, home: Path) -> dict[str, object]:
    """Files in the home, open sockets, and whether names were looked up, after some code ran."""
    home.mkdir()
    # onnxruntime is quiet where CI is set, so the test would not see a switch that is missing.
    environment = {k: v for k, v in os.environ.items() if k in KEPT}
    done = subprocess.run(
        [*empty_namespace(), sys.executable, "-c", WATCH.format(code=code), str(folder)],
        capture_output=True, text=True, check=True, timeout=60, cwd=home,
        env=environment | {"HOME": str(home), "TMPDIR": str(home)},
    )  # fmt: skip
    found: dict[str, object] = json.loads(done.stdout)
    return found | {"files": sorted(p.name for p in home.rglob("*") if p.is_file())}


QUIET = {"sockets": [], "resolver": 0, "files": []}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("part", PARTS)
def test_it_leaves_no_file_opens_no_socket_and_looks_up_no_name(part: str, tmp_path: Path) -> None:
    folder = write_export(tmp_path / "e")
    assert traces(PARTS[part], folder, tmp_path / "home") == QUIET


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_watch_sees_telemetry_that_is_on(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    if tuple(int(n) for n in ort.__version__.split(".")[:2]) < (1, 31):
        pytest.skip("this onnxruntime has no telemetry on this system")
    assert "deviceid" in str(traces(REAL, tmp_path, tmp_path / "home")["files"])
