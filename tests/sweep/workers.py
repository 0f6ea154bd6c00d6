"""Work for real worker processes, which load this file and little else."""

import os
import signal
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def odd_jobs(job: Json) -> Json:
    """Double a number, raise, print or die; and tell of itself."""
    if job["do"] == "raise":
        raise ValueError(f"{job['value']} is not to my taste")
    if job["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job["do"] == "print":
        os.write(1, b"printed by a trial\n")
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    told = {name: os.environ.get(name) for name in names}
    return told | {"pid": os.getpid(), "value": 2 * job["value"]}


def sleeper(job: Json) -> Json:
    """Work that never ends by itself."""
    Path(job["file"]).write_text(str(os.getpid()))
    time.sleep(600)
    return {}
