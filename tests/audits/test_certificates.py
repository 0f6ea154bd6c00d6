"""What `certify` says of a client, what it refuses, and its Fisher diagnostic."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from audits.made import gallery_rate
from torch import Generator, Tensor, nn

from splitveil.audits.bounds import capacity
from splitveil.audits.certificates import (
    CertifiedClient,
    certify,
    check_fresh,
    dfil,
    fingerprints,
)
from splitveil.errors import AuditError
from splitveil.threat import Labelled

STD = 0.2


def images(n: int, seed: int) -> Labelled:
    x = torch.rand(n, 1, 4, 4, generator=Generator().manual_seed(seed))
    return Labelled(x, torch.arange(n) % 3)


def rows(data: Labelled, places: Sequence[int]) -> Labelled:
    return Labelled(data.images[list(places)], data.labels[list(places)])


class Small(nn.Module):
    """Two smooth layers of fixed random weights; z in (0, 1)."""

    mix: Tensor

    def __init__(self, outputs: int = 5) -> None:
        super().__init__()
        drawn = torch.randn(16, outputs, generator=Generator().manual_seed(1))
        self.register_buffer("mix", drawn)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1).square() @ self.mix.to(x.dtype) * 0.5).sigmoid()


NET = Small()
CLIENT = CertifiedClient(clean=lambda x, _: NET(x), noise_var=STD**2, bounds=(0.0, 1.0))
FIT, FRESH, GALLERY = images(300, 1), images(400, 2), images(200, 3)
SEEN = [FIT]


def said(client: CertifiedClient = CLIENT, **changed: object) -> dict[str, Any]:
    parts: dict[str, Any] = {"gallery": GALLERY, "fit": FIT, "fresh": FRESH, "seen": SEEN}
    parts |= {"num_classes": 3, "generator": Generator().manual_seed(0)}
    return certify(client, **(parts | changed))


def test_a_bounded_client_with_known_noise_gets_every_certificate() -> None:
    found = said()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    z, y = NET(GALLERY.images), GALLERY.labels
    gallery, population = found["gallery"], found["population"]
    assert gallery["nats_given_class"] == pytest.approx(gallery_rate(z, STD**2, y))
    assert gallery["nats"] == pytest.approx(
        min(gallery_rate(z, STD**2), gallery["nats_given_class"] + gallery["label_entropy"])
    )
    by_repeats = gallery["nats_given_class_by_repeats"]
    assert by_repeats["16"] == pytest.approx(gallery_rate(z, STD**2 / 16, y))
    k = gallery["doubles"]["repeats"]
    rates = [gallery_rate(z, STD**2, y, repeats=r) for r in (1, k - 1, k)]
    assert rates[1] < 2 * rates[0] <= rates[2]
    assert 0 < gallery["identification_error"]["at_least"] < gallery["matcher_error"] < 1
    assert (gallery["vacuous"], gallery["beaten"]) == (False, False)
    assert found["capacity"]["nats"] == pytest.approx(capacity(STD**2, 0.0, 1.0, 5))
    assert population["mean"] < population["nats_given_class"] < found["capacity"]["nats"]
    assert (population["images"], population["confidence"]) == (400, 0.95)
    assert population["asymptotic"]["says"] == "no certificate: asymptotic"
    assert population["nats"] == pytest.approx(
        min(population["nats_given_class"] + math.log(3), found["capacity"]["nats"])
    )
    assert found["diagnostics"]["dfil_per_pixel"] > 0


def test_a_gallery_of_classes_far_apart_is_bounded_through_them() -> None:
    x = torch.cat([0.1 * images(30, 7).images, 1 - 0.1 * images(30, 8).images])
    gallery = Labelled(x, torch.arange(60) // 30)
    found = said(replace(CLIENT, clean=lambda x, _: x.flatten(1)), gallery=gallery)["gallery"]
    assert found["nats"] == pytest.approx(found["nats_given_class"] + math.log(2))
    assert found["nats"] < 0.5 * gallery_rate(x.flatten(1), STD**2)


def test_every_certificate_repeats_with_its_generator() -> None:
    assert said() == said()


@pytest.mark.parametrize(
    ("noise_var", "reason"),
    [(0.0, "the channel is deterministic"), (None, "noise of unknown scale")],
)
def test_without_known_noise_everything_is_refused(noise_var: float | None, reason: str) -> None:
    found = said(replace(CLIENT, noise_var=noise_var))
    assert sorted(found) == ["capacity", "diagnostics", "gallery", "population"]
    for entry in found.values():
        assert list(entry) == ["refused"]
        assert entry["refused"].startswith(f"no certificate: {reason}")


def test_unbounded_smashed_data_keeps_only_what_needs_no_bounds() -> None:
    found = said(replace(CLIENT, bounds=None))
    reason = "no certificate: z is not bounded; add a clip stage before the noise"
    assert found["population"] == found["capacity"] == {"refused": reason}
    assert "nats" in found["gallery"]


def test_bounds_that_do_not_hold_are_refused() -> None:
    found = said(replace(CLIENT, bounds=(0.4, 0.6)))
    for kind in ("population", "capacity"):
        assert "z is not bounded by [0.4, 0.6]" in found[kind]["refused"]


def test_the_full_covariance_gives_the_tighter_rate() -> None:
    z, y = NET(GALLERY.images), GALLERY.labels
    gallery = said()["gallery"]
    found = gallery["full_covariance"]
    assert found["nats_given_class"] == pytest.approx(gallery_rate(z, STD**2, y, covariance="full"))
    assert found["nats_given_class"] < gallery["nats_given_class"]
    assert found["nats"] < gallery["nats"]


def test_labels_outside_the_classes_are_refused() -> None:
    with pytest.raises(AuditError, match="below num_classes = 2, got 0 to 2"):
        said(num_classes=2)


def test_a_draw_that_only_some_images_meet_is_noticed() -> None:
    def clean(x: Tensor, generator: Generator | None) -> Tensor:
        z: Tensor = NET(x)
        some = torch.zeros_like(z)
        some[150:160] = torch.rand(z[150:160].shape, generator=generator)
        return z + some

    found = said(replace(CLIENT, clean=clean))
    assert "z is random before the noise" in found["gallery"]["refused"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"seen": [FIT, rows(FRESH, [7])]}, "overlap training data in 1 images"),
        ({"seen": None}, "may overlap training data, whose ids are not given"),
        ({"fit": rows(FRESH, range(10))}, "overlap fit data in 10 images"),
        ({"fresh": rows(FRESH, [i // 2 for i in range(400)])}, "200 of the fresh images"),
    ],
)
def test_fresh_data_that_are_not_fresh_are_refused(changed: dict[str, Any], reason: str) -> None:
    found = said(**changed)
    assert found["population"]["refused"].startswith("no certificate: ")
    assert reason in found["population"]["refused"]
    assert "nats" in found["gallery"]


def test_images_are_known_by_their_content_where_they_have_no_index() -> None:
    one, other = images(20, 5).images, images(20, 6).images
    ids = fingerprints(one)
    assert len(ids.unique()) == 20  # type: ignore[no-untyped-call]
    check_fresh(ids, {"training": fingerprints(other)})
    again = torch.cat([other, one[7:8]])
    with pytest.raises(AuditError, match="overlap training data in 1 images"):
        check_fresh(ids, {"training": fingerprints(again)})


@pytest.mark.parametrize("told", [True, False])
def test_randomness_before_the_noise_leaves_the_population_only(told: bool) -> None:
    def clean(x: Tensor, generator: Generator | None) -> Tensor:
        z: Tensor = NET(x)
        return z * torch.rand(z.shape, generator=generator).round()

    found = said(replace(CLIENT, clean=clean, random=told))
    assert "z is random before the noise" in found["gallery"]["refused"]
    assert found["population"]["nats_given_class"] > said()["population"]["nats_given_class"]


def test_a_client_that_says_it_draws_is_believed() -> None:
    found = said(replace(CLIENT, random=True))
    assert "z is random before the noise" in found["gallery"]["refused"]


def test_a_loud_client_has_no_vacuous_numbers() -> None:
    found = said(replace(CLIENT, noise_var=1e-8))
    for entry in (
        found["gallery"]["identification_error"],
        found["gallery"]["same_class_identification_error"],
        found["population"]["identification_error"],
    ):
        assert list(entry) == ["refused"]
        assert entry["refused"].startswith("vacuous: ")
    gallery = found["gallery"]
    assert (gallery["vacuous"], gallery["matcher_error"], gallery["beaten"]) == (True, 0.0, False)
    assert found["gallery"]["doubles"] == {
        "repeats": None,
        "limit": 4096,
        "says": "doubles never within 4096 sendings of one image",
    }


def jacobian_trace(x: Tensor, noise_var: Tensor) -> Tensor:
    """The definition, one image at a time, with the whole Jacobian."""
    found = []
    for image in x:
        rows: Any = torch.autograd.functional.jacobian(lambda v: NET(v[None])[0], image)  # type: ignore[no-untyped-call]
        flat = rows.flatten(1)  # (d_z, d_x)
        found.append((flat.T @ (flat / noise_var[:, None])).trace() / flat.shape[1])
    return torch.stack(found)


def test_the_fisher_diagnostic_is_the_jacobians_trace() -> None:
    x, noise = images(4, 0).images.double(), torch.linspace(0.1, 0.5, 5, dtype=torch.float64)
    oracle = jacobian_trace(x, noise)
    generator = Generator().manual_seed(0)
    exact = dfil(CLIENT.clean, x, noise, generator=generator, probes=None)
    torch.testing.assert_close(exact, oracle)
    guessed = dfil(CLIENT.clean, x, noise, generator=generator, probes=2000)
    torch.testing.assert_close(guessed, oracle, rtol=0.1, atol=0.0)


def test_fisher_information_of_k_sendings_is_k_times_that_of_one() -> None:
    x, generator = images(3, 0).images, Generator().manual_seed(0)
    once, often = (dfil(CLIENT.clean, x, v, generator=generator, probes=None) for v in (0.4, 0.1))
    torch.testing.assert_close(often, 4 * once)


def test_a_hidden_gradient_is_refused_not_called_private() -> None:
    found = said(replace(CLIENT, clean=lambda x, _: NET(x).detach()))
    assert "the encoder's Jacobian is hidden" in found["diagnostics"]["refused"]
