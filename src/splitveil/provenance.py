"""Where a number comes from: versions, commit, command line, hash of the model, device."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from splitveil import __version__
from splitveil.io import Json


def versions() -> Json:
    """Versions that a number depends on, and the commit if the source is a git checkout."""
    return {
        "splitveil": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of the source, with `+` if tracked files were changed; None if it is unknown.

    `$SPLITVEIL_COMMIT` wins. Set it for a copy of the source without its `.git`, for example in a
    container.
    """
    here = Path(__file__).resolve().parents[2]
    given = os.environ.get("SPLITVEIL_COMMIT")
    if given or not (here / ".git").exists():
        return given or None
    try:
        described = subprocess.run(  # noqa: S603 - fixed words, no shell
            # `--exclude=*` leaves out tags, so that only the commit is printed.
            ["git", "-C", here, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],  # noqa: S607 - the user's own git
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def command() -> str:
    """The command line of this process; `python -m splitveil` is written as `splitveil`."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def model_hash(*modules: nn.Module) -> str:
    """Hash (16 hex digits) of modules: of their structure and of every tensor they hold."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(repr(module).encode())
        for name, value in module.state_dict().items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """The device in words, such as "cpu (x86_64, 2 threads)"."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
