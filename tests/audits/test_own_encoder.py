"""A stranger's function behind the victim's face, and what an audit says of it."""

import json
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from audits.made import BrightestQuarter, a_target, attacks_alone, labelled
from torch import Tensor, nn

from splitveil.attacks.baseline import ClassMean, MeanImage, Nearest
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.profiles import LEAK_BUDGETS, PROFILES
from splitveil.attacks.rmle import Rmle
from splitveil.audits.certificates import rate_nats
from splitveil.audits.noise_tests import check_noise, measure_noise, sent_rate
from splitveil.audits.own_encoder import AuditImages, OwnEncoder, audit_encoder, seeded
from splitveil.audits.suite import by_attack, run_attacks
from splitveil.audits.trained_run import differences
from splitveil.errors import AuditError, ConfigError
from splitveil.io import Json
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.record.schema import Record
from splitveil.threat import Attack, Labelled, Victim

SMALL = Decoder(width=8, blocks=1, epochs=1, min_steps=4, batch_size=8)
TINY: dict[str, Attack] = {
    "mean": MeanImage(),
    "class-mean": ClassMean(),
    "nearest": Nearest(),
    "linear": Linear(),
    "decoder": SMALL,
    "rmle": Rmle(start=SMALL, steps=3, restarts=0, chunk=8, limit=8),
    "k-query": KQuery(repeats=3, inner=SMALL),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict[str, Any], PROFILES), "tiny", TINY)
    monkeypatch.setitem(cast(dict[str, Any], LEAK_BUDGETS), "tiny", LEAK_BUDGETS["smoke"])
    attacks_alone(monkeypatch)


def material() -> AuditImages:
    return AuditImages(
        name="made",
        classes=("a", "b", "c", "d"),
        aux=labelled(30, 0),
        scored=labelled(12, 1),
        test=labelled(12, 1),
        knowledge="train",
        hashes={},
    )


def audited(client: object, **options: Any) -> Json:  # noqa: ANN401 - fields of an OwnEncoder
    own = OwnEncoder(client=client, name="f", **options)
    record, _ = audit_encoder(own, material(), "tiny")
    found: Json = json.loads(record.to_json())
    return found


def numpy_noise(x: np.ndarray) -> np.ndarray:
    return np.asarray(x.reshape(len(x), -1) + 0.1 * np.random.standard_normal((len(x), 64)))


def noisy_sign(noise_std: float) -> tuple[Victim, Labelled]:
    """Sends 0.2 for half of the images of each class and 0.8 for the others, plus noise."""
    images = torch.tensor([0.2, 0.8]).repeat(200).view(400, 1, 1, 1)
    labels = torch.arange(400) // 2 % 2
    return Victim(nn.Flatten(), Channel([GaussianNoise(noise_std)])), Labelled(images, labels)


def test_the_rate_of_two_points_is_known_from_what_is_sent_alone() -> None:
    victim, data = noisy_sign(0.3)  # a variance of 0.09 under noise of 0.09
    assert sent_rate(victim, data, 2, 0.3, seed=0) == pytest.approx(0.5 * math.log(2), rel=0.03)
    assert rate_nats(victim, data, 2, 0.3) == pytest.approx(0.5 * math.log(2))


def test_noise_is_heard_and_a_false_declaration_refused() -> None:
    victim, data = noisy_sign(0.3)
    heard, repeatable = measure_noise(victim, data.images, seed=0)
    assert heard == pytest.approx(0.3, rel=0.1)
    assert repeatable
    for declared in (0.3, 0.1):
        check_noise(declared, heard, 400)
    with pytest.raises(AuditError, match=r"0\.5 was declared, but .* differ as by 0\.(29|30|31)"):
        check_noise(0.5, heard, 400)
    with pytest.raises(ConfigError, match="finite number > 0, got -1"):
        OwnEncoder(client=numpy_noise, name="f", noise_std=-1.0)


def test_the_numbers_are_those_of_the_same_client_as_a_run() -> None:
    case = a_target(nn.Flatten(), noise_std=0.1)
    own = by_attack(run_attacks(case, {n: a for n, a in TINY.items() if n != "rmle"}))
    record = audited(case.victim.send, server=case.head)
    assert list(differences(json.loads(json.dumps(own)), record["attacks"])) == []
    assert record["audit"]["left_out"].keys() == {"rmle"}
    assert record["audit"]["input"] == "cpu"


def test_two_audits_are_equal_and_what_is_unknown_is_null() -> None:
    first, second = audited(numpy_noise, noise_std=0.1), audited(numpy_noise, noise_std=0.1)
    assert list(differences(first, second)) == []
    assert first["accuracy"] is None
    assert {a["accuracy"] for a in first["attacks"].values()} == {None}
    assert first["audit"]["left_out"].keys() == {"rmle", "class-mean"}
    assert first["client"] == {"macs": None, "params": None, "wire_floats": 64, "stored": None}
    assert first["audit"]["noise"]["measured"] == pytest.approx(0.1, rel=0.1)
    assert first["true_rate_nats"] > 0
    assert "not known" in first["certificates"]["gallery"]["refused"]
    assert Record.from_dict(first).accuracy is None


def test_a_stream_of_its_own_is_noticed() -> None:
    own = np.random.default_rng(0)
    record = audited(lambda x: x.reshape(len(x), -1) + own.normal(size=(len(x), 64)))
    assert record["audit"]["repeatable"] is False
    assert "unknown scale" in record["certificates"]["gallery"]["refused"]


def test_values_that_are_not_finite_are_reported() -> None:
    bad = {labelled(12, 1).images[i].sum().item() for i in (3, 7)}

    def client(x: Tensor) -> Tensor:
        z = x.flatten(1).clone()
        for row, image in zip(z, x, strict=True):
            if image.sum().item() in bad:
                row[0] = math.nan
        return z

    record = audited(client, given="torch", server=BrightestQuarter())
    assert record["audit"]["not_finite"] == [3, 7]
    assert "values not finite" in {flag["name"] for flag in record["flags"]}
    assert record["audit"]["noise"]["measured"] == 0
    assert "deterministic" in record["certificates"]["gallery"]["refused"]


class Open:
    """A client that shows its networks; its noise is torch's global one."""

    def __init__(self, *, own_channel: bool) -> None:
        self.encoder = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Flatten(2))
        if own_channel:
            self.channel = lambda z: z + 0.2 * torch.randn_like(z)

    def __call__(self, x: Tensor) -> Tensor:
        z: Tensor = self.encoder(x)
        return z + 0.2 * torch.randn_like(z)


@pytest.mark.parametrize("kind", ["module", "declared noise", "own channel"])
def test_an_open_client_is_attacked_with_its_networks(kind: str) -> None:
    with seeded(0):
        clients = {
            "module": nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Flatten(2)),
            "declared noise": Open(own_channel=False),
            "own channel": Open(own_channel=True),
        }
    noise = 0.2 if kind == "declared noise" else None
    first, second = (audited(clients[kind], white_box=True, noise_std=noise) for _ in range(2))
    assert list(differences(first, second)) == []
    assert first["attacks"]["rmle"]["access"] == "white-box"
    assert first["audit"]["threat"] == "white-box"
    assert first["client"] == {"macs": 2 * 9 * 9, "params": 20, "wire_floats": 18, "stored": 20}


def test_a_client_that_cannot_be_opened_is_refused() -> None:
    with pytest.raises(ConfigError, match="'f' is a function: leave --white-box out"):
        audited(numpy_noise, white_box=True)
    client = Open(own_channel=False)
    client.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 18))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Open, "__call__", lambda self, x: self.encoder(x)[:, :5])
        with pytest.raises(AuditError, match=r"gives \(18,\) per image, .* \(5,\) is sent"):
            audited(client, white_box=True)
