"""Half a minute of `benchmarks/serve_load.py --strangers`; ten minutes are for a quiet machine."""

import sys
from pathlib import Path

import pytest

from splitveil.serve.log import MAX_BYTES

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import serve_load
from serve_load import GOOD, RATE

SECONDS = 30.0
MIB_MORE = 16.0  # of some 300


@pytest.mark.slow
def test_good_clients_do_not_notice_strangers(tmp_path: Path) -> None:
    manifest = serve_load.make_export("small", tmp_path / "export")
    request, path = serve_load.request_of(manifest, 1)
    found = serve_load.among_strangers(tmp_path / "export", request, path, SECONDS)
    crowd = found["among_strangers"]
    assert set(found["alone"]["statuses"]) == set(crowd["statuses"]) == {"200"}
    assert crowd["requests"] > 0.5 * GOOD * RATE * SECONDS
    more = found["memory_mib_at_most"] - found["memory_mib_after_a_third"]
    assert more < MIB_MORE
    assert found["log_bytes"] < MAX_BYTES / 10
