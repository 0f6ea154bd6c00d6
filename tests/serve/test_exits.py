"""The exit rule on the device: it decides as in training, and what it sends is limited."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from serve.made import CLASSES, SHAPE, head, pictures, write_export
from serve.test_client import Server
from torch import nn

from splitveil.audits.captured_requests import read_captured, send_and_capture
from splitveil.errors import AuditError, ConfigError, ExportError, ServerError
from splitveil.nets import exit as training
from splitveil.serve.client import CAPPED, DEVICE, NOT_REACHED, SERVED, Client
from splitveil.serve.exits import (
    ALWAYS,
    KINDS,
    LEVELS,
    NEVER,
    NOTHING,
    WINDOW,
    ExitRule,
    SendWindow,
    log_softmax,
    read_rule,
    sureness,
)  # fmt: skip
from splitveil.serve.export import exit_rule, int8_rule
from splitveil.serve.manifest import read_manifest
from splitveil.serve.server import load_app
from splitveil.serve.transport import Reply

SOME = ExitRule(kind="confidence", temperature=0.5, thresholds=(0.5,) * CLASSES)


def own_logits(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return head(x)


def half_sent(x: NDArray[np.float32]) -> ExitRule:
    """A rule that sends the less sure half of some images, by which its levels are made."""
    sure = sureness(own_logits(x), "confidence")
    levels = np.quantile(sure, np.linspace(0, 1, LEVELS))
    return ExitRule(
        kind="confidence", temperature=1.0, thresholds=(float(np.median(sure)),) * CLASSES,
        send=0.5, levels=tuple(levels.tolist()),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_export(tmp_path / "e", exit=half_sent(pictures(100)).to_json())


def gone(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
    raise ConnectionRefusedError("gone")


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), temperature=st.floats(0.05, 20))
def test_numpy_is_as_sure_as_torch(kind: Any, seed: int, temperature: float) -> None:  # noqa: ANN401
    logits = (5 * np.random.default_rng(seed).standard_normal((6, 10))).astype(np.float32)
    expected = training.sureness(torch.from_numpy(logits), kind, temperature).numpy()
    found = sureness(logits, kind, temperature)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-15)


@pytest.mark.parametrize("kind", get_args(training.Kind))
@pytest.mark.parametrize("average", [True, False])
def test_the_device_decides_and_answers_as_in_training(
    kind: Literal["confidence", "margin", "entropy"], average: bool
) -> None:
    rng = np.random.default_rng(1)
    own, server = (3 * rng.standard_normal((2, 400, 10))).astype(np.float32)
    trained = training.Exit(nn.Identity(), 10, kind=kind, average=average)
    labels = torch.from_numpy(rng.integers(0, 10, 400))
    trained.settle(torch.from_numpy(own), torch.from_numpy(server), labels)
    rule = exit_rule(trained)
    asked = trained.asks(torch.from_numpy(own))
    assert np.array_equal(rule.asks(own), asked.numpy())
    assert asked.sum() == 120
    expected = trained.answers(torch.from_numpy(own), torch.from_numpy(server), asked).numpy()
    found = rule.answers(own, server, asked.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_an_image_exactly_at_the_threshold_is_not_sent() -> None:
    own = np.array([[2, 1, 0, 0]], np.float32)
    sure = float(sureness(own, "confidence", 0.5)[0])
    # Last bits decide nothing, because they differ between libraries and browsers.
    for threshold, sent in ((sure, False), (np.nextafter(sure, 2), False), (sure + 1e-11, True)):
        rule = ExitRule(kind="confidence", temperature=0.5, thresholds=(float(threshold),) * 4)
        trained = training.Exit(nn.Identity(), 4)
        trained.temperature.fill_(0.5)
        trained.thresholds.fill_(threshold)
        assert rule.asks(own).tolist() == trained.asks(torch.from_numpy(own)).tolist() == [sent]


def test_each_class_has_its_own_threshold() -> None:
    rule = ExitRule(kind="margin", temperature=1.0, thresholds=(ALWAYS, NEVER))
    assert rule.asks(np.array([[9, 0], [0, 9], [1, 0]], np.float32)).tolist() == [True, False, True]


def test_a_threshold_that_sends_all_or_nothing_can_be_written_down() -> None:
    trained = training.Exit(nn.Identity(), 2)
    assert exit_rule(trained).thresholds == (ALWAYS, ALWAYS)
    trained.thresholds.fill_(-torch.inf)
    assert exit_rule(trained).thresholds == (NEVER, NEVER)


def test_a_client_in_eight_bits_has_a_threshold_of_its_own() -> None:
    rng = np.random.default_rng(4)
    own = (3 * rng.standard_normal((2000, CLASSES))).astype(np.float32)
    rough = (0.5 * own + 0.3 * rng.standard_normal(own.shape)).astype(np.float32)
    sure = sureness(own, "margin")
    rule = ExitRule(
        kind="margin", temperature=1.0, thresholds=(float(np.quantile(sure, 0.3)),) * CLASSES
    )
    assert rule.asks(rough).mean() > 0.4, "with the float client's threshold it would send more"
    small = int8_rule(rule, own, rough)
    assert small.asks(rough).mean() == pytest.approx(rule.asks(own).mean(), abs=1e-3)
    assert small.changed == (small.asks(rough) != rule.asks(own)).mean()
    assert small.changed is not None
    assert 0 < small.changed < 0.3
    by_class = replace(rule, thresholds=tuple(np.linspace(0.1, 0.6, CLASSES).tolist()))
    small = int8_rule(by_class, own, rough)
    for k in range(CLASSES):
        share = small.asks(rough)[rough.argmax(1) == k].mean()
        wanted = by_class.asks(own)[own.argmax(1) == k].mean()
        assert share == pytest.approx(wanted, abs=0.01)
    told = read_rule(by_class.to_json(small), CLASSES, int8=True)
    assert told == small
    with pytest.raises(ExportError, match="no exit rule for a client in eight bits"):
        read_rule(rule.to_json(), CLASSES, int8=True)


def test_own_logits_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(ExportError, match="own head gives numbers that are not finite"):
        SOME.asks(np.full((1, CLASSES), np.nan, np.float32))


def test_a_rule_survives_its_json() -> None:
    rule = half_sent(pictures(30))
    assert read_rule(rule.to_json(), CLASSES) == rule
    assert read_rule(SOME.to_json(), CLASSES) == SOME
    assert read_rule(None, CLASSES) is read_rule(NOTHING, CLASSES) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "luck"}, "kind must be one of confidence, margin, entropy"),
        ({"temperature": 0}, "temperature must be above 0"),
        ({"temperature": "1"}, "temperature must be above 0"),
        ({"thresholds": [0.5]}, "thresholds must be 4 finite numbers"),
        ({"thresholds": [0.5, 0.5, 0.5, float("nan")]}, "thresholds must be 4 finite numbers"),
        ({"average": 1}, "average must be true or false"),
        ({"send": 1.5}, "send must be null or in 0..1"),
        ({"levels": [0.5, 0.25]}, "levels must be null or 101 rising numbers"),
        ({"changed": 2}, "changed must be null or in 0..1"),
        ({"int8": {"noise": "off"}}, "unknown exit rule"),
        ({"noise": "off"}, "unknown exit rule"),
        ({"sends": "everything"}, "unknown exit rule"),
    ],
)
def test_a_rule_that_this_version_does_not_know_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        read_rule(SOME.to_json() | change, CLASSES)


def test_only_the_unsure_images_are_sent_and_the_answer_says_which(folder: Path) -> None:
    server, x = Server(folder), pictures(100)
    client = Client(folder, server)
    logits, where = client.answer(x)
    rule = half_sent(x)
    asked = rule.asks(own_logits(x))
    assert where == tuple(SERVED if a else DEVICE for a in asked)
    assert asked.sum() == 50
    sent = np.concatenate(server.rows)
    assert np.array_equal(sent, client.send(x[asked]))
    np.testing.assert_allclose(logits[asked], log_softmax(head(sent)), atol=1e-5)
    np.testing.assert_allclose(logits[~asked], log_softmax(own_logits(x[~asked])), atol=1e-5)
    assert np.array_equal(client.infer(x), logits)
    assert [row["where"] for row in client.classify(x)] == list(where)


def test_the_server_is_met_only_before_the_first_image_is_sent(folder: Path) -> None:
    server, x = Server(folder), pictures(100)
    asked = half_sent(x).asks(own_logits(x))
    client = Client(folder, server)
    assert set(client.answer(x[~asked]).where) == {DEVICE}
    assert server.headers == []
    client.answer(x[asked][:1])
    assert len(server.headers) == 2


def test_without_a_server_the_device_answers_and_says_so_and_waits_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def counted(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        calls.append(path)
        return gone(method, path, body, headers)

    x = pictures(100)
    asked = half_sent(x).asks(own_logits(x))
    client = Client(folder, counted, patience=0.0, rest=3600.0)
    for _ in range(3):
        logits, where = client.answer(x)
        assert where == tuple(NOT_REACHED if a else DEVICE for a in asked)
        np.testing.assert_allclose(logits, log_softmax(own_logits(x)), atol=1e-5)
    assert len(calls) == 1
    assert "The device answers alone for 3600 s" in caplog.text
    eager = Client(folder, counted, patience=0.0, rest=0.0)
    eager.answer(x)
    eager.answer(x)
    assert len(calls) == 3


def test_what_was_answered_before_the_server_went_is_kept(folder: Path) -> None:
    server, x = Server(folder), pictures(100)
    left = [3]  # the description of the model, and two batches

    def failing(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        left[0] -= 1
        return server(method, path, body, headers) if left[0] >= 0 else gone("", "", b"", {})

    logits, where = Client(folder, failing, batch=4, patience=0.0).answer(x)
    rows = np.flatnonzero(half_sent(x).asks(own_logits(x)))
    assert [where[i] for i in rows] == [SERVED] * 8 + [NOT_REACHED] * 42
    sent = np.concatenate(server.rows)
    np.testing.assert_allclose(logits[rows[:8]], log_softmax(head(sent)), atol=1e-5)
    np.testing.assert_allclose(logits[rows[8:]], log_softmax(own_logits(x[rows[8:]])), atol=1e-5)


def test_a_server_that_refuses_is_an_error_and_not_the_devices_answer(folder: Path) -> None:
    def refusing(*_: Any) -> Reply:  # noqa: ANN401
        return Reply(401, b'{"error": "who are you"}')

    with pytest.raises(ServerError, match="refused with 401"):
        Client(folder, refusing).answer(pictures(100))


def test_always_and_never_ask(folder: Path) -> None:
    x = pictures(100)
    server = Server(folder)
    assert set(Client(folder, server, always_ask=True).answer(x).where) == {SERVED}
    assert len(np.concatenate(server.rows)) == 100
    assert set(Client(folder, never_ask=True).answer(x).where) == {DEVICE}
    away = Client(folder, gone, always_ask=True, patience=0.0).answer(x).where
    assert set(away) == {NOT_REACHED}


def test_a_cap_holds_in_every_window_whatever_the_rule_says(folder: Path) -> None:
    x = pictures(100)
    server = Server(folder)
    client = Client(folder, server, max_share=0.2)
    for k in range(3):
        parts = [client.answer(x[i : i + 7]).where for i in range(0, 100, 7)]
        where = [w for part in parts for w in part]
        assert (where.count(SERVED), where.count(CAPPED), where.count(DEVICE)) == (20, 30, 50)
        assert len(np.concatenate(server.rows)) == 20 * (k + 1)
    assert CAPPED not in Client(folder, Server(folder), max_share=0.5).answer(x).where


@pytest.mark.parametrize("send", [0.0, 0.1, 0.25, 0.5])
def test_a_client_may_send_less_than_the_rule_and_only_what_the_rule_sends(
    folder: Path, send: float
) -> None:
    x = pictures(100)
    allowed = half_sent(x).asks(own_logits(x))
    where = np.array(Client(folder, Server(folder), send=send).answer(x).where)
    assert (where == SERVED).sum() == round(100 * send)
    assert not ((where == SERVED) & ~allowed).any()


def test_sending_unlike_expected_is_said_once_per_window(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = pictures(100)
    sure = half_sent(x).asks(own_logits(x))
    client = Client(folder, Server(folder))
    for _ in range(3):
        client.answer(x)
    assert caplog.messages == []
    odd = np.concatenate([x[sure], x[sure]])
    client.answer(np.concatenate([odd, odd]))
    told = "of the last 100 images the exit rule sends 100 %, expected 50 ± 16 %"
    assert [told in message for message in caplog.messages] == [True, True]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_a_window_counts_what_the_rule_asks_for_even_if_nothing_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    window = SendWindow(max_share=0.0, expected=0.0)
    every = np.ones(WINDOW, bool)
    assert not window.admit(every, every).any()
    assert "sends 100 %, expected 0 ± 1 %" in caplog.text


def test_a_client_that_answers_alone_needs_no_server(tmp_path: Path) -> None:
    folder, x = write_export(tmp_path / "e", exit=dict(NOTHING)), pictures(5)
    made = read_manifest(folder)
    assert (made.silent, made.wire_floats, made.rule, made.noise_std) == (True, 0, None, 0)
    with Client(folder) as client:
        logits, where = client.answer(x)
        np.testing.assert_allclose(logits, own_logits(x), rtol=1e-5, atol=1e-6)
        assert where == (DEVICE,) * 5
        assert np.array_equal(client.infer(x), logits)
        assert client.send(x).shape == (5, 0)
        assert client.infer(x[:0]).shape == (0, CLASSES)
    with pytest.raises(ExportError, match="answers alone on the device, so there is nothing"):
        load_app(folder)


def test_the_identity_covers_the_exit(tmp_path: Path) -> None:
    plain = read_manifest(write_export(tmp_path / "plain"))
    rules = [SOME, half_sent(pictures(9)), None]
    made = [
        read_manifest(write_export(tmp_path / str(k), exit=None if r is None else r.to_json()))
        for k, r in enumerate(rules)
    ]
    assert len({m.identity for m in made}) == 3
    assert made[2].identity == plain.identity


WISHES: list[tuple[Callable[[Path], Any], str]] = [
    (Client, "sends images to a server; give its address"),
    (lambda e: Client(e, gone, always_ask=True, never_ask=True), "always_ask and never_ask contra"),
    (lambda e: Client(e, gone, always_ask=True, max_share=0.1), "always_ask and max_share contra"),
    (lambda e: Client(e, gone, send=0.6), "send must be in 0..0.5, the share that the exit rule"),
    (lambda e: Client(e, gone, send=-0.1), "send must be in 0..0.5"),
    (lambda e: Client(e, gone, max_share=1.1), "max_share must be in 0..1, got 1.1"),
]


@pytest.mark.parametrize(("make", "message"), WISHES)
def test_a_wish_that_cannot_be_granted_is_refused(
    folder: Path, make: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(folder)


def test_wishes_about_a_rule_need_a_rule(tmp_path: Path) -> None:
    plain = write_export(tmp_path / "plain")
    alone = write_export(tmp_path / "alone", exit=dict(NOTHING))
    bare = write_export(tmp_path / "bare", exit=SOME.to_json())
    with pytest.raises(ConfigError, match=r"max_share is for .* but this one sends every image"):
        Client(plain, gone, max_share=0.5)
    with pytest.raises(ConfigError, match=r"always_ask is for .* but this one answers alone"):
        Client(alone, always_ask=True)
    with pytest.raises(ConfigError, match="does not say how sure the client was"):
        Client(bare, gone, send=0.1)


def test_a_capture_holds_what_the_rule_sends_and_not_more(folder: Path, tmp_path: Path) -> None:
    x = pictures(100)
    files = send_and_capture(folder, Server(folder), torch.from_numpy(x), tmp_path / "wire")
    rows = [len(read_captured(file, SHAPE, 100, step=0.5 / 16).z) for file in files]
    assert rows == [50, 50]
    with pytest.raises(ServerError, match="was not reached, so images that the exit rule sends"):
        send_and_capture(folder, gone, torch.from_numpy(x), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_client_that_answers_alone_captures_nothing(tmp_path: Path) -> None:
    alone = write_export(tmp_path / "alone", exit=dict(NOTHING))
    with pytest.raises(AuditError, match="sends nothing, so there is nothing to capture"):
        send_and_capture(alone, gone, torch.from_numpy(pictures(3)), tmp_path / "wire")
