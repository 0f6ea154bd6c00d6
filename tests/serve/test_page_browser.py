"""The page in a real browser: the noisy smashed data of the picture leave, and nothing else."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from serve import made
from serve.browser import Browser, opened
from serve.conftest import NOISE, Exported
from serve.made import CLASSES, SHAPE, head, write_export
from serve.web import (
    READY,
    Recorder,
    need_runtime,
    send,
    served,
    shown,
    text,
    upload,
    visit,
    with_attacker,
)
from torch import nn

from splitveil.grid import step_of
from splitveil.nets.exit import Exit
from splitveil.serve import page
from splitveil.serve.exits import KINDS, ExitRule, sureness
from splitveil.serve.manifest import ATTACKER, CLIENT, SERVER, OnnxHalf, load_half, read_manifest
from splitveil.serve.stages import STAGES, apply_stages
from splitveil.serve.wire import TensorSpec

pytestmark = pytest.mark.browser

TOKEN = "0123456789abcdef"  # noqa: S105


@dataclass(frozen=True)
class Shown:
    """A page that is ready, and its server."""

    browser: Browser
    folder: Path
    url: str
    server: Recorder

    def half(self, file: str) -> OnnxHalf:
        return load_half(self.folder, read_manifest(self.folder), file, 1)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need_runtime()
    with opened(tmp_path_factory.mktemp("profile")) as found:
        found.resize(1000, 900)
        yield found


@pytest.fixture(scope="module")
def loaded(
    browser: Browser, exported: Exported, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shown]:
    folder = with_attacker(exported, tmp_path_factory.mktemp("page") / "e")
    with served(folder) as (url, server):
        visit(browser, url)
        yield Shown(browser, folder, url, server)


@pytest.fixture
def ready(loaded: Shown) -> Shown:
    """The page, whatever another test left in it; what its server hears is recorded anew."""
    if loaded.browser.value("location.href") != f"{loaded.url}/":
        visit(loaded.browser, loaded.url)
    loaded.browser.resize(1000, 900)
    loaded.browser.value("document.getElementById('clear').click()")
    loaded.browser.events.clear()
    loaded.server.calls.clear()
    return loaded


@pytest.fixture(scope="module")
def files(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    found = [folder / f"{k}.png" for k in range(8)]
    for path, image in zip(found, exported.images, strict=False):
        Image.fromarray(np.rint(255 * image[0]).astype(np.uint8)).save(path)
    return found


def test_loading_asks_for_files_and_sends_nothing(loaded: Shown) -> None:
    assert {(c.method, c.query, c.body) for c in loaded.server.calls} == {("GET", b"", b"")}
    asked = {c.path for c in loaded.server.calls if c.path.startswith("/export")}
    assert asked == {f"/export/{f}" for f in ("manifest.json", CLIENT, ATTACKER)}
    assert loaded.browser.complaints() == []


def test_only_the_noisy_smashed_data_leave(ready: Shown, files: list[Path]) -> None:
    browser = ready.browser
    for path in files:
        upload(browser, path)
        send(browser)
    calls = ready.server.calls
    assert [(c.method, c.path) for c in calls] == [("POST", "/v2/models/digits/infer")] * 8
    for call in calls:
        length = int(call.headers["inference-header-content-length"])
        assert json.loads(call.body[:length]) == {
            "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
            "inputs": [
                {"name": "z", "shape": [1, 8, 4, 4], "datatype": "INT16",
                 "parameters": {"binary_data_size": 256}}
            ],
        }  # fmt: skip
        assert len(call.body) == length + 256
        assert not {"cookie", "authorization", "referer"} & call.headers.keys()
        assert call.query == b""
    sent = np.concatenate([c.rows() for c in calls])
    pixels = np.stack([np.asarray(Image.open(p), np.float32) for p in files])[:, None]
    noise = sent - ready.half(CLIENT)(pixels / np.float32(255))
    assert abs(noise.std() / NOISE - 1) < 6 / math.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 6 * NOISE / math.sqrt(noise.size)
    assert browser.complaints() == []


def test_it_shows_what_was_sent_answered_and_rebuilt(ready: Shown, files: list[Path]) -> None:
    browser = ready.browser
    upload(browser, files[2])
    assert np.array_equal(shown(browser, "picture"), np.asarray(Image.open(files[2])))
    send(browser)
    (call,) = ready.server.calls
    sent = call.rows()
    assert text(browser, "answer") == f"class {ready.half(SERVER)(sent)[0].argmax()}"
    assert "128 numbers, 256 bytes" in text(browser, "bytes")
    guess = 255 * ready.half(ATTACKER)(sent)[0, 0]
    assert np.abs(shown(browser, "guess") - guess).max() < 0.51
    assert "'decoder-small' of the audit" in text(browser, "attacker")
    heat = shown(browser, "heat")  # eight tiles of 4×4 in three columns, one pixel apart
    assert heat.shape == (14, 14)
    tiles = np.stack([heat[r : r + 4, c : c + 4] for r in (0, 5, 10) for c in (0, 5, 10)])[:8]
    assert tiles.ravel()[sent.argmin()] == 13  # the ramp's ends
    assert tiles.ravel()[sent.argmax()] == 250


def sent_anew(ready: Shown, file: Path) -> NDArray[np.float32]:
    """What a new page sends of a picture."""
    visit(ready.browser, ready.url)
    upload(ready.browser, file)
    send(ready.browser)
    return ready.server.sent()[-1].rows()


def independent(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    """Whether two sendings of a picture have noise of their own."""
    differ = one - other
    spread = abs(differ.std() / (NOISE * math.sqrt(2)) - 1) < 6 / math.sqrt(2 * differ.size)
    return bool((differ != 0).mean() > 0.9 and spread)


def forget(ready: Shown) -> None:
    ready.browser.call("Storage.clearDataForOrigin", origin=ready.url, storageTypes="indexeddb")


def test_a_picture_gets_one_draw_also_in_a_new_page(ready: Shown, files: list[Path]) -> None:
    forget(ready)
    first = sent_anew(ready, files[0])
    assert "sent before" not in text(ready.browser, "bytes")
    send(ready.browser)
    assert "sent before" in text(ready.browser, "bytes")
    assert np.array_equal(ready.server.sent()[-1].rows(), first)
    assert np.array_equal(sent_anew(ready, files[0]), first)
    assert "sent before" in text(ready.browser, "bytes")
    forget(ready)
    assert independent(sent_anew(ready, files[0]), first)
    assert ready.browser.complaints() == []


IN_STORE = """(async () => {
  const done = (r) => new Promise((ok) => { r.onsuccess = () => ok(r.result); });
  const base = await done(indexedDB.open("splitveil-draws", 1));
  const all = base.transaction(["key", "draws"], "readwrite");
  const [keys, draws] = [all.objectStore("key"), all.objectStore("draws")];
  %s
})()"""


def test_the_browser_keeps_a_hash_and_a_seed_of_the_last_pictures_and_no_more(
    ready: Shown, files: list[Path]
) -> None:
    forget(ready)
    sent_anew(ready, files[0])
    kept = ready.browser.value(
        IN_STORE
        % """const key = await done(keys.get(0));
  const held = await crypto.subtle.exportKey("raw", key).then(() => "read", (e) => e.name);
  const [row] = await done(draws.getAll());
  return [held, Object.keys(row).sort(), row.digest.byteLength, row.seed.byteLength];"""
    )
    assert kept == ["InvalidAccessError", ["digest", "seed", "used"], 32, 32]
    ready.browser.value(
        IN_STORE
        % """for (let i = 0; i < 1004; i++) {
    draws.put({ digest: new Uint8Array([i, i >> 8]), seed: new Uint8Array(32), used: i });
  }"""
    )
    upload(ready.browser, files[1])
    send(ready.browser)
    count, oldest = ready.browser.value(
        IN_STORE
        % """const [row] = await done(draws.index("used").getAll(null, 1));
  return [await done(draws.count()), row.used];"""
    )
    assert (count, oldest) == (1000, 6)  # two pictures were used after them
    forget(ready)


def test_a_browser_that_keeps_nothing_draws_anew_in_a_new_page(
    ready: Shown, files: list[Path]
) -> None:
    source = "Object.defineProperty(crypto, 'subtle', { value: undefined })"  # as on plain http
    added = ready.browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    try:
        first = sent_anew(ready, files[0])
        send(ready.browser)
        assert np.array_equal(ready.server.sent()[-1].rows(), first)
        assert independent(sent_anew(ready, files[0]), first)
    finally:
        ready.browser.call("Page.removeScriptToEvaluateOnNewDocument", **added)
        visit(ready.browser, ready.url)


def test_a_picture_can_be_drawn_by_hand_and_by_keys(ready: Shown) -> None:
    browser = ready.browser
    x, y, size = browser.value(
        "(() => { const r = document.getElementById('picture').getBoundingClientRect();"
        " return [r.x, r.y, r.width]; })()"
    )
    middle = x + 4.5 * size / 8
    browser.mouse("mousePressed", middle, y + 1.5 * size / 8)
    browser.mouse("mouseMoved", middle, y + 6.5 * size / 8)
    browser.mouse("mouseReleased", middle, y + 6.5 * size / 8)
    drawn = shown(browser, "picture")
    assert (drawn[1:7, 4] == 255).all()
    assert (drawn[:, [0, 1, 2, 6, 7]] == 0).all()
    browser.value("document.getElementById('clear').click()")
    assert not shown(browser, "picture").any()
    browser.value("document.getElementById('picture').focus()")
    for key in (" ", "ArrowLeft", "ArrowUp", " "):
        browser.key(key)
    browser.value("document.getElementById('picture').blur()")
    typed = shown(browser, "picture")
    assert sorted(zip(*np.nonzero(typed), strict=True)) == [(3, 3), (4, 4)]
    send(browser)
    image = (typed / np.float32(255)).astype(np.float32)[None, None]
    (call,) = ready.server.calls
    assert np.abs(call.rows() - ready.half(CLIENT)(image)).max() < 9 * NOISE
    assert browser.complaints() == []


def test_another_size_is_scaled_before_the_users_eyes(ready: Shown, tmp_path: Path) -> None:
    browser = ready.browser
    wide = np.zeros((80, 120), np.uint8)
    wide[:, 60:] = 200
    Image.fromarray(wide).save(tmp_path / "wide.png")
    (tmp_path / "no.png").write_text("no picture")
    upload(browser, tmp_path / "wide.png")
    assert "120 × 80, cut to its middle and scaled to 8 × 8" in text(browser, "taken")
    seen = shown(browser, "picture").astype(int)
    assert (np.abs(seen[:, 5:] - 200) <= 2).all()
    assert (seen[:, :3] <= 2).all()
    browser.choose("#file", tmp_path / "no.png")
    browser.wait("document.getElementById('status').className === 'bad'")
    assert "no.png cannot be read as a picture" in text(browser, "status")
    assert ready.server.calls == []


def test_a_phone_shows_the_page_without_scrolling_sideways(ready: Shown, files: list[Path]) -> None:
    browser = ready.browser
    upload(browser, files[3])
    send(browser)
    browser.value("document.querySelector('details').open = true")
    for dark in (False, True):
        browser.resize(390, 844, dark=dark)
        assert browser.value("document.documentElement.scrollWidth") == 390
        ground = browser.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(v) for v in ground[4:-1].split(",")) < 200) == dark


def test_the_token_is_asked_for_and_kept_nowhere(ready: Shown, files: list[Path]) -> None:
    browser = ready.browser
    submit = (
        "document.getElementById('token').value = '{}';"
        "document.getElementById('token-form').requestSubmit()"
    )
    with served(ready.folder, TOKEN) as (url, server):
        browser.visit(url)
        browser.wait("document.getElementById('token-form')?.hidden === false")
        assert browser.complaints() == []
        assert not [c for c in server.calls if c.path.startswith("/export")]
        browser.value(submit.format("wrong-wrong-wrong"))
        browser.wait("document.getElementById('status').className === 'bad'")
        assert "refused with 401: a valid bearer token is needed" in text(browser, "status")
        browser.value(submit.format(TOKEN))
        browser.wait(READY)
        upload(browser, files[0])
        send(browser)
        kept = browser.value(
            "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
        )
        assert TOKEN not in browser.value("document.documentElement.outerHTML")
        assert browser.value("document.getElementById('token').value") == ""
    assert kept == [0, 0, "", f"{url}/"]
    assert server.sent()[0].headers["authorization"] == f"Bearer {TOKEN}"


def test_without_the_runtime_the_page_says_what_to_run(
    browser: Browser, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "has_runtime", lambda: False)
    with served(exported.folder) as (url, _):
        browser.events.clear()
        browser.visit(url)
        browser.wait("document.getElementById('runtime-missing')?.hidden === false")
        assert "make web" in browser.value("document.body.innerText")
        assert browser.value("document.getElementById('work').hidden")
        assert browser.complaints() == []


def rule_for(
    x: NDArray[np.float32], kind: str = "confidence", *, average: bool = False
) -> ExitRule:
    """A rule of the tiny export that sends the less sure half of some images."""
    sure = sureness(head(x), kind, 0.5)
    return ExitRule(
        kind=kind, temperature=0.5, thresholds=(float(np.median(sure)),) * CLASSES, send=0.5,
        average=average,
    )  # fmt: skip


def test_a_colour_page_shows_no_picture_before_there_is_one(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "SHAPE", (3, 1, 2))
    colours = np.array([[[250, 20, 130], [0, 255, 90]]], np.uint8)
    Image.fromarray(colours).save(tmp_path / "colours.png")
    with served(write_export(tmp_path / "e")) as (url, _):
        visit(browser, url)
        assert browser.value("document.getElementById('picture').hidden")
        upload(browser, tmp_path / "colours.png")
        assert not browser.value("document.getElementById('picture').hidden")


@pytest.mark.parametrize("average", [False, True])
def test_the_page_answers_what_it_is_sure_of_and_sends_the_rest(
    browser: Browser, tmp_path: Path, average: bool
) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (16, *SHAPE), dtype=np.uint8)
    x = (pixels / np.float32(255)).astype(np.float32)
    rule = rule_for(x, average=average)
    asked = rule.asks(head(x))
    assert asked.sum() == 8
    with served(write_export(tmp_path / "e", exit=rule.to_json())) as (url, server):
        visit(browser, url)
        assert "about 50 % of them" in text(browser, "rule")
        assert "answers what it is sure of" in text(browser, "intro")
        assert text(browser, "from").startswith("From this device, or from the server")
        for k, image in enumerate(pixels):
            Image.fromarray(image[0]).save(tmp_path / f"{k}.png")
            upload(browser, tmp_path / f"{k}.png")
            send(browser)
            kept = int((~asked[: k + 1]).sum())
            word = f"{k + 1} pictures"
            assert text(browser, "kept") == f"{kept} of {word} never left this device."
            assert browser.value("document.getElementById('leaves').hidden") == (not asked[k])
            assert len(server.sent()) == int(asked[: k + 1].sum())
            said = text(browser, "from")
            assert said.startswith(
                "From the server" if asked[k] else "From this device, which is sure"
            )
            if not asked[k]:
                assert text(browser, "answer") == f"class {head(x[k : k + 1])[0].argmax()}"
        send(browser)  # the last picture once more
        assert text(browser, "kept").startswith("8 of 16 pictures")
    upload(browser, tmp_path / f"{int(np.flatnonzero(asked)[0])}.png")
    send(browser)  # the server is gone
    assert "the server could not be reached" in text(browser, "from")
    browser.events.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_decides_at_the_threshold_as_the_client_and_the_training(
    ready: Shown,
    kind: Any,  # noqa: ANN401
) -> None:
    rng = np.random.default_rng(7)
    own = (4 * rng.standard_normal((300, 10))).astype(np.float32)
    sure = sureness(own, kind, 0.7)
    trained = Exit(nn.Identity(), 10, kind=kind)
    trained.temperature.fill_(0.7)
    decided = []
    # At the threshold itself, in the last bits beside it, and clearly beside it.
    for moved, sent in ((sure, False), (np.nextafter(sure, 2), False), (sure + 1e-11, True),
                        (sure - 1e-11, False)):  # fmt: skip
        rules = [ExitRule(kind=kind, temperature=0.7, thresholds=(float(t),) * 10) for t in moved]
        here = [bool(rule.asks(row[None])[0]) for rule, row in zip(rules, own, strict=True)]
        told = json.dumps([rule.to_json() for rule in rules])
        page_says = ready.browser.value(
            f"import('{ready.url}/page/exits.js').then((m) => {{ const rules = {told}; const own = "
            f"{own.tolist()}; rules.forEach((r) => m.checkRule(r, 10));"
            " return own.map((row, i) => m.asks(Float32Array.from(row), rules[i])); })"
        )
        for row, threshold in zip(own, moved, strict=True):
            trained.thresholds.fill_(float(threshold))
            decided.append(bool(trained.asks(torch.from_numpy(row[None]))[0]))
        assert here == page_says == decided[-300:] == [sent] * 300


def test_the_page_answers_with_the_clients_numbers(ready: Shown) -> None:
    rng = np.random.default_rng(8)
    own, server = (3 * rng.standard_normal((2, 40, 10))).astype(np.float32)
    for average in (False, True):
        rule = ExitRule(kind="margin", temperature=1.7, thresholds=(0.5,) * 10, average=average)
        for answered in (False, True):
            given = f"{server.tolist()}[i]" if answered else "null"
            found = ready.browser.value(
                f"import('{ready.url}/page/exits.js').then((m) => {own.tolist()}.map((row, i) => "
                f"m.answers(row, {given}, {json.dumps(rule.to_json())})))"
            )
            expected = rule.answers(own, server, np.full(40, answered))
            np.testing.assert_allclose(np.array(found), expected, rtol=1e-6, atol=1e-6)


def test_a_rule_that_the_page_does_not_know_sends_nothing(ready: Shown) -> None:
    rule = ExitRule(kind="confidence", temperature=1.0, thresholds=(0.5,) * CLASSES).to_json()
    changes = ({"kind": "luck"}, {"noise": "off"}, {"temperature": 0}, {"thresholds": [0.5]},
               {"thresholds": ["0.5"] * CLASSES}, {"sends": "all"})  # fmt: skip
    for change in changes:
        told = ready.browser.value(
            f"import('{ready.url}/page/exits.js').then((m) => m.checkRule("
            f"{json.dumps(rule | change)}, {CLASSES})).then(() => 'known', (e) => e.message)"
        )
        assert "does not know this exit rule, so it sends nothing" in told, change


QUIET: list[dict[str, Any]] = [
    *({"kind": "topk", "prune": share} for share in (0.3, 0.5, 0.75)),
    *({"kind": "quantise", "bits": bits} for bits in (1, 4, 16)),
    {"kind": "clip", "low": -0.2, "high": 0.7},
]
LOUD: list[tuple[dict[str, Any], float, float]] = [
    ({"kind": "gaussian", "std": 0.3}, 0.25, 0.3),
    ({"kind": "learned", "noise": "gaussian", "file": "-", "std": 0.3}, 1.25, 0.3),
    ({"kind": "learned", "noise": "laplace", "file": "-", "std": 0.3}, 1.25, 0.3 * math.sqrt(2)),
    ({"kind": "dropout", "p": 0.3}, 0.7 * 0.25, 0.25 * math.sqrt(0.21)),
]
COUNT = 40_000


def in_page(ready: Shown, values: str, stage: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """What the page makes of values by one stage, or why it refuses."""
    return ready.browser.value(
        f"import('{ready.url}/page/stages.js').then((m) => {{ const z = {values}; const stage = "
        f"{json.dumps(stage)}; if (stage.kind === 'learned') {{ stage.scale = z.map(() => 0.3);"
        " stage.location = z.map(() => 1); } return Array.from(m.applyStages(z, [stage])); })"
        ".catch((error) => error.message)"
    )


NOISES: list[dict[str, Any]] = [
    *({"kind": "gaussian", "std": std} for std in (0.025, 0.3, 5.0)),
    *({"kind": "learned", "noise": n, "file": "-", "std": 0.3} for n in ("gaussian", "laplace")),
]


@pytest.mark.parametrize("stage", NOISES, ids=lambda s: f"{s.get('noise', '')}{s['std']}")
def test_equal_random_words_give_the_page_and_the_client_equal_integers(
    ready: Shown, stage: dict[str, Any]
) -> None:
    numbers = np.random.default_rng(1)
    z = numbers.normal(0.4, 0.5, 500).astype(np.float32)
    given = numbers.bytes(8 * z.size)
    ready.browser.value(
        "(() => { const real = crypto.getRandomValues.bind(crypto); crypto.getRandomValues = "
        f"(to) => {{ to.set(Uint32Array.from({np.frombuffer(given, '<u4').tolist()})); "
        "crypto.getRandomValues = real; return to; }; return true; })()"
    )
    found = np.array(in_page(ready, f"Float32Array.from({z.tolist()})", stage), np.float32)
    if stage["kind"] == "learned":
        stage = stage | {"scale": np.full_like(z, 0.3), "location": np.ones_like(z)}
    assert np.array_equal(found, apply_stages(z[None], [stage], lambda size: given)[0])
    step = float(step_of(float(stage["std"]) if stage["kind"] == "gaussian" else 0.3))
    spec = TensorSpec(name="z", shape=(500,), datatype="INT32", step=step)
    sent = ready.browser.value(
        f"import('{ready.url}/page/wire.js').then((m) => {{ const r = m.encodeRequest("
        f"Float32Array.from({found.tolist()}), {{wire_shape: [500], datatype: 'INT32', grid: "
        f"{step!r}}}); return Array.from(r.body.subarray(r.headerBytes)); }})"
    )
    assert bytes(sent) == spec.to_sent(found[None]).tobytes()


def test_the_pages_channel_is_the_clients(ready: Shown) -> None:
    known = f"import('{ready.url}/page/stages.js').then((m) => Object.keys(m.STAGES))"
    assert set(ready.browser.value(known)) == STAGES.keys()
    z = np.random.default_rng(0).normal(0.4, 0.5, 37).astype(np.float32)
    z[:4] = 0.5, -0.5, 0.5, 0.1
    for stage in QUIET:
        found = in_page(ready, f"Float32Array.from({z.tolist()})", stage)
        expected = apply_stages(z[None], [stage])[0]
        assert np.array_equal(np.array(found, np.float32), expected), stage
    for stage, mean, std in LOUD:
        drawn = np.array(in_page(ready, f"new Float32Array({COUNT}).fill(0.25)", stage))
        spread = math.sqrt(5 / 4) if stage.get("noise") == "laplace" else math.sqrt(1 / 2)
        rounding = 0.3 / 32 if stage["kind"] != "dropout" else 0
        assert abs(drawn.mean() - mean) < 6 * std / math.sqrt(COUNT) + rounding, stage
        assert abs(drawn.std() / std - 1) < 6 * spread / math.sqrt(COUNT), stage
    for bad in ({"kind": "blur"}, {"kind": "toString"}, {"kind": "gaussian"}):
        assert "stage" in in_page(ready, "new Float32Array(2)", bad), bad
    for numbers, told in (
        ([1, 2, 3, -4], [1, 2, 3, -4]),
        ([1, 2, 3], "Error: n has the wrong size."),
        ([1, 0, 3, 4], "Error: n holds noise that is not finite or has no scale."),
    ):
        read = f"m.withNoise({{file: 'n'}}, Float32Array.from({numbers}).buffer, 2)"
        assert told == ready.browser.value(
            f"import('{ready.url}/page/stages.js').then((m) => {read})"
            ".then((s) => [...s.scale, ...s.location], String)"
        )
