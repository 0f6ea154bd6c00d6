"""The audit of the wire: what was captured is attacked, and noise that is not there is missed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from audits.made import attacks_alone
from torch import Generator, Tensor

import splitveil as sv
from splitveil.attacks import profiles
from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.linear import Linear
from splitveil.audits.captured_requests import audit_wire, in_order, own_images, read_captured
from splitveil.audits.certificates import KINDS
from splitveil.audits.suite import Store
from splitveil.audits.target import Target
from splitveil.audits.trained_run import open_run
from splitveil.data.catalogue import load
from splitveil.errors import AuditError, DataError, WireError
from splitveil.record.schema import Record
from splitveil.serve.manifest import LOGITS, WIRE
from splitveil.serve.transport import RecordingTransport, Reply
from splitveil.serve.wire import TensorSpec, encode_request
from splitveil.threat import Attack

TINY: dict[str, Attack] = {"mean": MeanImage(), "linear": Linear()}
Sending = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def tiny_profile() -> Iterator[None]:
    """The profile `smoke` without its slow attacks; no leaks beyond pixels, no certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "PROFILES", {"smoke": TINY})
        attacks_alone(patch)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    """A run on digits, trained a little and audited."""
    folder = str(tmp_path_factory.mktemp("runs"))
    run = sv.fit(sv.RunConfig(dataset="digits", defence="noise", epochs=1, runs_dir=folder))
    run.audit("smoke")
    return sv.load_run(run.path)


@pytest.fixture(scope="module")
def unsure(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    """The same with an early exit: it sends about three in ten images."""
    folder = str(tmp_path_factory.mktemp("runs"))
    config = sv.RunConfig(
        dataset="digits", defence="early-exit", epochs=3, runs_dir=folder, noise_std=0.05
    )
    run = sv.fit(config)
    run.audit("smoke")
    return sv.load_run(run.path)


@pytest.fixture(scope="module")
def target(run: sv.Run) -> Target:
    return open_run(run, aux="train")[0]


def capture(file: Path, z: Tensor, *, binary: bool = True, note: str | None = None) -> Path:
    """Z as a client sends it, 32 rows in a call."""
    write = RecordingTransport(lambda *_: Reply(200, b""), file)
    spec = TensorSpec(name=WIRE, shape=tuple(z.shape[1:]))
    for part in torch.split(z.cpu(), 32):
        message = encode_request(part.numpy(), spec, LOGITS, binary=binary)
        body = message.body
        if note is not None:
            body = json.dumps(json.loads(body) | {"note": note}).encode()
        write("POST", "/v2/models/m/infer", body, message.headers)
    return file


def drawn(target: Target, seed: int) -> Tensor:
    """A fresh sending of the scored images by the run's own client."""
    return target.victim.send(target.scored.images, Generator(target.device).manual_seed(seed))


def clean(target: Target) -> Tensor:
    with torch.no_grad():
        z: Tensor = target.victim.encoder(target.scored.images)
    return z


def audited(run: sv.Run, *files: Path) -> Record:
    return audit_wire(run, files, "smoke", earlier=run.record)[0]


def names(record: Record) -> set[str]:
    return {name for name in record.flag_names if "wire" in name}


@pytest.mark.parametrize("binary", [True, False])
def test_a_sound_wire_agrees_with_the_runs_own_audit(
    run: sv.Run, target: Target, tmp_path: Path, *, binary: bool
) -> None:
    first = capture(tmp_path / "a", drawn(target, 1), binary=binary)
    record = audited(run, first, capture(tmp_path / "b", drawn(target, 2)[:99], binary=binary))
    heard = record.audit.wire
    assert names(record) == set()
    assert heard["failed"] == []
    assert heard["noise"]["measured"] == pytest.approx(run.noise_std, rel=0.03)
    assert [tap["rows"] for tap in heard["captures"]] == [len(target.scored), 99]
    offline = run.record
    assert offline is not None
    assert record.true_rate_nats == offline.true_rate_nats
    assert heard["offline"]["mse"] == pytest.approx(offline.strongest.mse, rel=1e-3)
    assert heard["offline"]["difference_low"] < 0 < heard["offline"]["difference_high"]
    assert record.strongest.mse != offline.strongest.mse  # these bytes, not other draws
    assert record.attacks["mean"].mse == offline.attacks["mean"].mse
    assert json.loads(record.to_json())["audit"]["wire"] == heard


def test_the_attacks_are_scored_on_the_captured_bytes(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    dark = torch.zeros_like(drawn(target, 1))
    record = audited(run, capture(tmp_path / "a", dark))
    assert record.attacks["linear"].mse > 1.2 * record.audit.wire["offline"]["mse"]


def seeded(target: Target, seed: int = 5) -> Tensor:
    """Every call of 32 rows draws the same noise again."""
    z = clean(target)
    std = float(getattr(target.victim.white_box().channel, "noise_std", 0.0))
    noise = torch.randn(32, *z.shape[1:], generator=Generator().manual_seed(seed))
    return z + std * noise.to(z).repeat(len(z) // 32 + 1, 1, 1, 1)[: len(z)]


FAULTS: dict[str, tuple[Callable[[Target], Tensor], str]] = {
    "off": (clean, "noise missing on the wire"),
    "half": (lambda o: (clean(o) + drawn(o, 1)) / 2, "noise missing on the wire"),
    "seeded": (seeded, "noise repeats on the wire"),
    "rounded": (lambda o: (drawn(o, 1) * 10).round() / 10, "noise not as declared on the wire"),
    "scaled": (lambda o: drawn(o, 1) + 0.1 * clean(o), "another client on the wire"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_that_is_not_the_audited_one_is_flagged(
    fault: str, run: sv.Run, target: Target, tmp_path: Path
) -> None:
    make, flag = FAULTS[fault]
    assert flag in names(audited(run, capture(tmp_path / "a", make(target))))


def test_noise_that_is_off_leaks_more_than_the_audit_said(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    record = audited(run, capture(tmp_path / "a", clean(target)))
    assert names(record) == {"noise missing on the wire", "wire leaks more than the audit"}
    assert record.audit.wire["offline"]["difference_high"] < 0
    assert record.true_rate_nats is None
    entries = record.to_dict()["certificates"]
    assert len(entries) == len(KINDS)
    for entry in entries.values():
        assert entry["refused"].startswith(
            "no certificate: what was sent is not the encoder's output"
        )
        assert "quieter" in entry["refused"]


def test_an_encoder_in_eight_bits_has_no_certificate_of_the_runs(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    file = capture(tmp_path / "a", drawn(target, 1))
    record, _ = audit_wire(run, [file], "smoke", clean=run.model.encoder)
    assert record.audit.wire["failed"] == []
    assert "the 8-bit client sent this" in str(record.certificates["population"].refused)
    assert record.true_rate_nats is None


def test_a_client_that_draws_the_same_after_a_restart_is_flagged(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    z = drawn(target, 1)
    first, again = capture(tmp_path / "a", z), capture(tmp_path / "b", z[:64])
    assert names(audited(run, first)) == set()
    assert names(audited(run, first, again)) == {"noise repeats on the wire"}


def test_floating_point_noise_is_flagged(run: sv.Run, target: Target, tmp_path: Path) -> None:
    """What a client of 0.1.0 sends: noise that is right in every way but its last bits."""
    with torch.no_grad():
        sent = run.model.channel(clean(target), Generator().manual_seed(1))
    record = audited(run, capture(tmp_path / "a", sent))
    assert names(record) == {"floating-point noise on the wire"}
    assert record.audit.wire["failed"] == ["grid"]


def test_noise_that_follows_the_low_bits_of_z_is_flagged(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    step = run.noise_std / 16
    with torch.no_grad():
        z = clean(target)
        sent = run.model.channel(z, Generator().manual_seed(1))
    rest = z / step - (z / step).round()
    record = audited(run, capture(tmp_path / "a", ((sent / step) + 8 * rest).round() * step))
    assert "floating-point noise on the wire" in names(record)
    assert "low bits" in record.audit.wire["failed"]


def test_integers_of_the_exports_client_are_read(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    z, step = drawn(target, 1), float(np.float32(run.noise_std) / np.float32(16))
    spec = TensorSpec(name=WIRE, shape=tuple(z.shape[1:]), datatype="INT16", step=step)
    write = RecordingTransport(lambda *_: Reply(200, b""), tmp_path / "a")
    message = encode_request(z.numpy(), spec, LOGITS)
    write("POST", "/v2/models/m/infer", message.body, message.headers)
    found = read_captured(tmp_path / "a", spec.shape, len(z), step=step)
    assert torch.equal(found.z, z)
    assert audited(run, tmp_path / "a").audit.wire["failed"] == []
    with pytest.raises(WireError, match=r"holds integers, but .* one grid"):
        read_captured(tmp_path / "a", spec.shape, len(z))


def test_what_is_sent_beside_z_is_flagged(run: sv.Run, target: Target, tmp_path: Path) -> None:
    file = capture(tmp_path / "a", drawn(target, 1), binary=False, note="cat.png")
    record = audited(run, file)
    assert names(record) == {"more than z on the wire"}
    assert record.audit.wire["beside"] == ["note in a request"]


def test_another_channel_is_heard_by_what_it_allows(run: sv.Run, target: Target) -> None:
    from splitveil.audits.noise_tests import channel_tests
    from splitveil.nets.channel import (
        Channel,
        Clip,
        Dropout,
        GaussianNoise,
        LearnedNoise,
        Quantise,
        deployed,
    )

    encoder, x = run.model.encoder, target.scored.images
    z = clean(target)
    learned = LearnedNoise(0.1, moves=True)
    learned.size_to(tuple(z.shape[1:]))
    with torch.no_grad():
        assert learned.gain is not None
        assert learned.location is not None
        learned.gain.normal_(0, 0.1, generator=Generator().manual_seed(0))
        learned.location.add_(0.3)
    kinds = {
        "learned": (Channel([Clip(0.2, 0.8), learned]), {"quieter", "slope", "repeats"}),
        "rounded": (Channel([GaussianNoise(0.1), Quantise(3)]), {"nearer", "farther", "starts"}),
        "dropped": (Channel([Dropout(0.3)]), {"nearer", "farther", "starts"}),
        "nothing": (Channel([Clip(0.45, 0.5)]), {"different"}),
    }
    for name, (channel, tests) in kinds.items():
        with torch.no_grad():
            one, other = (deployed(channel)(z, Generator().manual_seed(s)) for s in (1, 2))
        sound = channel_tests(encoder, channel, one, x, again=other[:50])
        assert sound["failed"] == [], name
        assert tests <= sound["tests"].keys()
        assert channel_tests(encoder, channel, z, x)["failed"], (
            name
        )  # a channel that is switched off
        if name != "nothing":
            assert "starts" in channel_tests(encoder, channel, one, x, again=one[:50])["failed"]


def test_images_of_ones_own_are_scored_in_their_order(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    aux = (target.aux.images[:60].cpu() * 255).round().to(torch.uint8).numpy()
    mine = np.flip(aux, 3).copy()
    np.savez(tmp_path / "mine.npz", x=mine, y=np.arange(60) % 10, layout="nchw")
    np.savez(tmp_path / "known.npz", x=aux, y=np.arange(60) % 10, layout="nchw")
    for name, classes in (("two", ["7", "3"]), ("cats", ["cat", "3"])):
        labels = np.arange(60) % 2
        np.savez(tmp_path / f"{name}.npz", x=mine, y=labels, classes=classes, layout="nchw")
    np.savez(tmp_path / "small.npz", x=mine[..., :4], y=np.arange(60) % 10, layout="nchw")
    images = load(f"npz:{tmp_path}/mine.npz")
    there = replace(target, scored=own_images(target, images))
    assert len(there.scored) == 60
    sent = capture(tmp_path / "a", drawn(there, 1))
    record, _ = audit_wire(run, [sent], "smoke", images=images, earlier=run.record)
    assert names(record) == set()
    assert "no audit of this model" in record.audit.wire["offline"]["refused"]
    assert run.record is not None
    assert record.splits.scored != run.record.splits.scored
    with pytest.raises(DataError, match="60 images of --sent are among the attacker's"):
        own_images(target, load(f"npz:{tmp_path}/known.npz"))
    two = own_images(target, load(f"npz:{tmp_path}/two.npz"))
    assert two.labels[:4].tolist() == [7, 3, 7, 3]  # by name
    with pytest.raises(DataError, match=r"the run does not know: cat; the run knows 0, 1"):
        own_images(target, load(f"npz:{tmp_path}/cats.npz"))
    with pytest.raises(DataError, match=r"shape \(1, 8, 4\), the run takes \(1, 8, 8\)"):
        own_images(target, load(f"npz:{tmp_path}/small.npz"))


def test_captures_that_cannot_be_matched_with_images_are_refused(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    z = drawn(target, 1)
    short = capture(tmp_path / "short", z[:40])
    with pytest.raises(AuditError, match=r"short holds 40 rows for 359 images; it must hold each"):
        audited(run, short)
    with pytest.raises(AuditError, match="the second was recorded after"):
        audited(run, short, short, short)
    other = capture(tmp_path / "other", z[:, :1])
    with pytest.raises(WireError, match=r"call 1 of .*other: shape must be \[rows, "):
        audited(run, other)
    empty = tmp_path / "empty"
    RecordingTransport(lambda *_: Reply(200, b""), empty)
    with pytest.raises(WireError, match="holds no calls"):
        read_captured(empty, (1,), 9)


def test_stored_attacks_are_those_of_the_same_bytes(
    run: sv.Run, target: Target, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store", "code")
    first, second = (capture(tmp_path / str(s), drawn(target, s)) for s in (1, 2))
    runs = [audit_wire(run, [f], "smoke", store=store)[0] for f in (first, second, first)]
    assert runs[0].strongest == runs[2].strongest != runs[1].strongest
    assert len(list((tmp_path / "store").iterdir())) == 2 * len(TINY)


def test_of_an_early_exit_only_what_the_rule_sends_is_captured(
    unsure: sv.Run, tmp_path: Path
) -> None:
    target = open_run(unsure, aux="train")[0]
    assert target.exit is not None
    asked, z = target.exit.asked, drawn(target, 1)
    record = audited(unsure, capture(tmp_path / "a", z[asked]))
    heard = record.audit.wire
    assert names(record) & {"another client on the wire", "sent more than the rule allows"} == set()
    count = int(asked.sum())
    assert heard["rule"] == {
        "images": len(asked), "allowed": count, "sent": count, "not_allowed": 0
    }  # fmt: skip
    assert heard["failed"] == []
    own = unsure.record
    assert own is not None
    assert record.sent == own.sent == count / len(asked)
    assert heard["offline"]["mse"] == pytest.approx(own.strongest.mse, rel=1e-3)
    assert record.exposure == pytest.approx(own.exposure, rel=0.1)
    # What a cap or a lowered threshold leaves out is no fault.
    fewer = asked & (torch.arange(len(asked)) % 2 == 0)
    record = audited(unsure, capture(tmp_path / "b", z[fewer]))
    assert record.audit.wire["rule"]["not_allowed"] == 0
    assert record.audit.wire["failed"] == []
    assert record.sent == int(fewer.sum()) / len(asked)
    assert (
        record.audit.wire["offline"]["refused"] == "other images were sent than in the run's audit"
    )


def loosened(asked: Tensor) -> Tensor:
    more = asked.clone()
    more[(~asked).nonzero().flatten()[:40]] = True
    return more


def swapped(asked: Tensor) -> Tensor:
    other = asked.clone()
    other[asked.nonzero().flatten()[:20]] = False
    other[(~asked).nonzero().flatten()[:20]] = True
    return other


@pytest.mark.parametrize(
    ("change", "beyond"), [(torch.ones_like, None), (loosened, 40), (swapped, 20)]
)
def test_a_client_that_sends_more_than_the_rule_is_flagged(
    unsure: sv.Run, change: Callable[[Tensor], Tensor], beyond: int | None, tmp_path: Path
) -> None:
    target = open_run(unsure, aux="train")[0]
    assert target.exit is not None
    asked = target.exit.asked
    sent = change(asked)
    record = audited(unsure, capture(tmp_path / "a", drawn(target, 1)[sent]))
    assert "sent more than the rule allows" in record.flag_names
    (seen,) = (f.seen for f in record.flags or () if f.name == "sent more than the rule allows")
    count = int(sent.sum())
    assert str(seen).startswith(f"{count} of 359 images were sent, the exit rule sends")
    told = record.audit.wire["rule"]["not_allowed"]
    # One or two images may lie so near to the threshold that rounding could have sent them.
    assert told == pytest.approx(beyond or 359 - int(asked.sum()), abs=2)
    assert record.audit.wire["failed"] == []
    assert record.sent == count / 359


def test_a_client_that_answers_alone_has_nothing_to_capture(tmp_path: Path) -> None:
    folder = str(tmp_path / "runs")
    alone = sv.fit(sv.RunConfig(dataset="digits", defence="alone", epochs=1, runs_dir=folder))
    with pytest.raises(AuditError, match="sends nothing, so there is nothing to capture"):
        audited(alone, tmp_path / "none")


def test_rows_are_placed_in_order_as_by_trying_all() -> None:
    draws = Generator().manual_seed(0)
    for m, n in ((1, 1), (2, 5), (3, 6), (6, 6)):
        cost = torch.rand(m, n, generator=draws)
        tried = min(combinations(range(n), m), key=lambda at: float(cost[range(m), list(at)].sum()))
        assert in_order(cost).tolist() == list(tried)


def test_a_query_in_the_path_is_beside_z(tmp_path: Path) -> None:
    file = capture(tmp_path / "a", torch.zeros(2, 3))
    assert read_captured(file, (3,), 2).beside == ()
    file.write_text(file.read_text().replace("/infer", "/infer?image=7"))
    assert read_captured(file, (3,), 2).beside == ("a query in the path",)
