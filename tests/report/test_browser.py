"""The page in a real browser: what a reader sees is what was written."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def browser() -> str:
    for name in ("/usr/bin/chromium", "chromium", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    if os.environ.get("CI") == "true":
        pytest.fail("no Chromium found; CI must have one")
    pytest.skip("no Chromium found; install `chromium` to run this test")


def visit(page: Path, profile: Path, extra: Sequence[str]) -> str:
    command = [browser(), *FLAGS, f"--user-data-dir={profile}", *extra, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.browser
def test_a_reader_sees_headings_rows_and_pictures(written: list[Path], tmp_path: Path) -> None:
    page = written[0]
    dom = visit(page, tmp_path / "profile", ["--dump-dom"])
    for words in ("Key numbers", "What an attacker sees", "How to read these numbers"):
        assert f">{words}</h2>" in dom
    for name in ("none", "gated-att", "veil"):
        assert f'<th scope="row">{name}</th>' in dom
    assert dom.count("<img ") == 6

    shot = tmp_path / "shot.png"
    visit(page, tmp_path / "profile2", ["--window-size=1280,3000", f"--screenshot={shot}"])
    with Image.open(shot) as image:
        assert image.size == (1280, 3000)
        picture = np.asarray(image.convert("RGB")).astype(int)
    grid = picture[700:1600, 300:1100]  # the digits of the reconstruction grid are dark
    assert (grid.max(-1) < 40).mean() > 0.1
    assert (picture[:, :30] == picture[0, 0]).all()  # nothing spills over the left margin
    assert (picture[:, -30:] == picture[0, 0]).all()
