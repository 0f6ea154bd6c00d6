"""The store of draws: one image, one draw, also after a restart; and nothing on disk but hashes."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from serve.conftest import NOISE, Exported
from serve.made import NOISY, pictures, write_export

from splitveil.errors import ServerError
from splitveil.serve.client import Client
from splitveil.serve.draws import KEY, REMEMBERED, SECRET, TABLE, DrawStore, default_store
from splitveil.serve.manifest import CLIENT, load_half

NOWHERE = "http://localhost:1"  # `send` needs no server
RESTARTS = 64


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "state" / "draws"


def bytes_of(store: DrawStore, images: Any, scope: str = "export") -> list[bytes]:  # noqa: ANN401
    return [entropy(16) for entropy in store.streams(scope, images)]


def clean(exported: Exported, images: NDArray[np.float32]) -> NDArray[np.float32]:
    return load_half(exported.folder, exported.manifest, CLIENT, 1)(images)


def restarted(
    exported: Exported, x: NDArray[np.float32], draws: Path | None = None
) -> NDArray[np.float32]:
    """What a client sends for images after each of many restarts (restarts, n, …)."""
    return np.stack([
        Client(exported.folder, NOWHERE, threads=1, draws=draws).send(x) for _ in range(RESTARTS)
    ])  # fmt: skip


def test_restarts_do_not_help_a_server_to_average_the_noise_away(
    exported: Exported, store: Path
) -> None:
    x = exported.images[:20]
    z = clean(exported, x)
    with_store, without = restarted(exported, x, draws=store), restarted(exported, x)
    assert np.ptp(with_store, axis=0).max() == 0
    one = np.std(with_store[0] - z)
    assert one == pytest.approx(NOISE, rel=0.05)
    assert np.std(with_store.mean(0) - z) == pytest.approx(one, rel=1e-5)
    assert np.std(without.mean(0) - z) == pytest.approx(NOISE / 8, rel=0.05)


def test_nearly_equal_images_are_other_images(exported: Exported, store: Path) -> None:
    """A limit, stated in the threat model with its figure."""
    x = exported.images[:20]
    rng = np.random.default_rng(0)
    near = [
        np.clip(x + rng.uniform(-1 / 255, 1 / 255, x.shape), 0, 1).astype(np.float32)
        for _ in range(RESTARTS)
    ]
    with Client(exported.folder, NOWHERE, threads=1, draws=store) as client:
        sent = np.stack([client.send(images) for images in near])
    assert np.std(sent.mean(0) - clean(exported, x)) == pytest.approx(NOISE / 8, rel=0.1)


def test_an_image_keeps_its_draw_in_another_batch_after_a_restart(
    exported: Exported, store: Path
) -> None:
    x = exported.images[:33]
    first = Client(exported.folder, NOWHERE, threads=1, draws=store).send(x)
    client = Client(exported.folder, NOWHERE, threads=1, draws=store)
    alone = np.concatenate([client.send(image[None]) for image in x])
    assert np.array_equal(alone, first)


def test_another_encoder_gets_another_draw(exported: Exported, store: Path, tmp_path: Path) -> None:
    """The difference of two z that were sent with one draw would have no noise."""
    x = exported.images[:50]
    sent, sent8 = (
        Client(exported.folder, NOWHERE, threads=1, draws=store, int8=int8).send(x)
        for int8 in (False, True)
    )
    assert np.std(sent - sent8) > 1.3 * NOISE
    images = pictures(1)
    draws = {
        Client(write_export(tmp_path / str(k), stages), NOWHERE, draws=store).send(images).tobytes()
        for k, stages in enumerate((NOISY, ({"kind": "gaussian", "std": 0.25},)))
    }
    assert len(draws) == 2
    one = DrawStore(store)
    assert bytes_of(one, images, "a") != bytes_of(one, images, "b")


def test_the_disk_holds_no_image_and_nothing_that_is_sent(tmp_path: Path, store: Path) -> None:
    export, x = write_export(tmp_path / "e"), pictures(40)
    sent = Client(export, NOWHERE, draws=store).send(x)
    files = list(store.iterdir())
    assert sorted(f.name for f in files) == [TABLE, KEY]
    content = b"".join(f.read_bytes() for f in files)
    assert len(content) < 64 * 1024
    for rows in (x, sent):
        assert not any(value.tobytes() in content for value in rows.ravel() if value)
    with sqlite3.connect(store / TABLE) as table:
        lengths = table.execute("SELECT length(digest), length(seed), drawn FROM draws").fetchall()
    table.close()
    assert set(lengths) == {(SECRET, SECRET, 1)}
    assert len(lengths) == 40


def test_key_and_seeds_do_not_give_a_draw_without_the_image(store: Path) -> None:
    """Whoever takes the store must guess the image to undo its noise."""
    first = DrawStore(store)
    one, other = pictures(2)
    mine = bytes_of(first, one[None])[0]
    with sqlite3.connect(store / TABLE) as table:
        table.execute("UPDATE draws SET digest = ?", (first._hmac(b"image", _told(other)),))
    table.close()
    assert bytes_of(first, other[None])[0] != mine


def _told(image: NDArray[np.float32]) -> bytes:
    return b"export\0" + image.tobytes()


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_store_is_private_whatever_the_umask(store: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        DrawStore(store)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (store, *store.iterdir())}
    assert modes == {"draws": 0o700, KEY: 0o600, TABLE: 0o600}
    (store / KEY).chmod(0o640)
    with pytest.raises(
        ServerError, match=r"key must be a file that only you can read; .* chmod 60"
    ):
        DrawStore(store)


@pytest.mark.parametrize("folder", [True, False])
def test_the_draws_used_longest_ago_are_dropped_first(store: Path, folder: bool) -> None:
    found = DrawStore(store if folder else None, size=2, budget=2)
    a, b, c = pictures(3)[:, None]
    first = [bytes_of(found, image) for image in (a, b)]
    assert bytes_of(found, a) == first[0]  # now the younger one
    third = bytes_of(found, c)
    assert bytes_of(found, a) == first[0]
    assert bytes_of(found, c) == third
    assert bytes_of(found, b) != first[1]


def test_the_store_is_bounded_and_forgets_images_at_last(store: Path) -> None:
    found = DrawStore(store, size=3)
    for start in range(0, 100, 7):
        bytes_of(found, pictures(100)[start : start + 7])
    with sqlite3.connect(store / TABLE) as table:
        kept, known = table.execute("SELECT count(seed), count(*) FROM draws").fetchone()
        totals = table.execute("SELECT seeds, images FROM totals").fetchone()
    table.close()
    assert (kept, known) == totals == (3, 3 * REMEMBERED)


def test_a_dropped_seed_is_overwritten_on_disk(store: Path) -> None:
    found = DrawStore(store, size=1, budget=1)
    bytes_of(found, pictures(1))
    with sqlite3.connect(store / TABLE) as table:
        (seed,) = table.execute("SELECT seed FROM draws").fetchone()
    table.close()
    assert seed in (store / TABLE).read_bytes()
    bytes_of(found, pictures(1, seed=1))
    assert seed not in (store / TABLE).read_bytes()


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("budget", [1, 3])
def test_an_image_gets_no_more_draws_than_its_budget(
    store: Path, folder: bool, budget: int
) -> None:
    found = DrawStore(store if folder else None, size=1, budget=budget)
    image, others = pictures(1), pictures(20, seed=1)[:, None]
    draws = set()
    for other in others[:budget]:
        draws |= {bytes_of(found, image)[0] for _ in range(5)}  # repeats are no new draws
        bytes_of(found, other)  # which drops the image's draw
    assert len(draws) == budget
    with pytest.raises(ServerError, match=rf"image 1 .* {budget} draw.* budget is {budget}: one m"):
        found.streams("export", np.concatenate([others[-1], image]))
    bytes_of(found, others[budget - 1])  # still there: the refused call drew nothing
    if folder:
        with pytest.raises(ServerError, match="budget"):  # a restart changes nothing
            bytes_of(DrawStore(store, size=1, budget=budget), image)
        assert bytes_of(DrawStore(store, size=1, budget=budget + 1), image)[0] not in draws


def test_no_draw_at_all_is_no_setting() -> None:
    with pytest.raises(ServerError, match="cache must be at least 1 draw, got 0"):
        DrawStore(size=0)
    with pytest.raises(ServerError, match="budget must be at least 1 draw, got 0"):
        DrawStore(budget=0)


def test_plus_and_minus_zero_are_one_number() -> None:
    found, zero = DrawStore(), np.zeros((1, 1, 2, 2), np.float32)
    assert bytes_of(found, zero) == bytes_of(found, -zero)
    assert bytes_of(found, zero) != bytes_of(DrawStore(), zero)


SEND = """
import sys, numpy as np
from splitveil.serve.draws import DrawStore
from pathlib import Path
images = np.random.default_rng(0).random((200, 1, 2, 3), dtype=np.float32)
store = DrawStore(Path(sys.argv[1]))
for at in range(0, 200, 10):
    for entropy in store.streams("export", images[at : at + 10]):
        sys.stdout.buffer.write(entropy(16))
"""


def test_processes_that_share_a_store_share_its_draws(store: Path) -> None:
    words = [sys.executable, "-c", SEND, str(store)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(3)]
    told = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert told[0] == told[1] == told[2]
    assert len({told[0][i : i + 16] for i in range(0, len(told[0]), 16)}) == 200


def test_a_process_that_is_killed_while_it_draws_leaves_a_store_that_works(store: Path) -> None:
    first = bytes_of(DrawStore(store), pictures(1))
    code = """
import os, sys
from pathlib import Path
from splitveil.serve.draws import DrawStore
with DrawStore(Path(sys.argv[1]))._table() as table:
    table.execute("UPDATE draws SET seed = NULL")
    os.kill(os.getpid(), 9)
"""
    words = [sys.executable, "-c", code, str(store)]
    done = subprocess.run(words, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert bytes_of(DrawStore(store), pictures(1)) == first


def broken(store: Path, how: str) -> None:
    if how == "another key":
        (store / KEY).write_bytes(bytes(SECRET))
    elif how == "a short key":
        (store / KEY).write_bytes(b"short")
    elif how == "no key":
        (store / KEY).unlink()
    elif how == "no table":
        (store / TABLE).write_bytes(b"no table" * 1000)
    elif how == "a folder":
        (store / TABLE).unlink()
        (store / TABLE).mkdir()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("another key", r"is not the key of .*draws\.sqlite; put the right one back, or remove"),
        ("a short key", "is not the key of"),
        ("no key", "is not the key of"),
        ("no table", r"cannot use the store of draws in .*: file is not a database; choose anoth"),
        ("a folder", r"cannot use the store of draws in .*: Is a directory"),
    ],
)
def test_a_broken_store_is_refused_and_never_replaced(store: Path, how: str, message: str) -> None:
    bytes_of(DrawStore(store), pictures(1))
    broken(store, how)
    before = [p.read_bytes() for p in sorted(store.iterdir()) if p.is_file()]
    with pytest.raises(ServerError, match=message):
        DrawStore(store)
    assert [p.read_bytes() for p in sorted(store.iterdir()) if p.is_file()] == before


def test_a_place_that_cannot_hold_a_store_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        ServerError, match=r"cannot use the store of draws in .*Not a directory|File"
    ):
        DrawStore(tmp_path / "file" / "draws")


def test_the_default_place_is_the_users_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "posix")
    assert default_store({"XDG_STATE_HOME": "/state"}) == Path("/state/splitveil/draws")
    assert default_store({}) == Path.home() / ".local" / "state" / "splitveil" / "draws"
