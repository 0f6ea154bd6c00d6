"""Clients with learned stages: what was trained is what is exported and what runs."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from splitveil.errors import ExportError
from splitveil.grid import STEPS
from splitveil.nets.channel import Channel, GaussianNoise, LearnedNoise, SparseCoding
from splitveil.nets.split import SplitModel, with_stage_shapes
from splitveil.serve.client import Client
from splitveil.serve.export import export_model, export_parts, stages_json
from splitveil.serve.manifest import CLIENT, FILE, Manifest, load_half, read_manifest, read_stages
from splitveil.serve.noise import noise_steps
from splitveil.serve.server import load_app, running
from splitveil.serve.stages import apply_stages, mean_std, pack_noise, with_noise

IMAGE = (1, 4, 4)


def noise(kind: Any, shape: tuple[int, ...], *, moves: bool = True) -> LearnedNoise:  # noqa: ANN401
    stage = LearnedNoise(0.1, kind, moves=moves)
    stage.size_to(shape)
    generator = torch.Generator().manual_seed(1)
    for value in (stage.gain, stage.location):
        if value is not None:
            value.data = torch.randn(value.shape, generator=generator) / 4
    return stage


@dataclass(frozen=True)
class Learned:
    """A model with every kind of learned stage, and its export."""

    model: SplitModel
    stages: tuple[nn.Module, ...]
    folder: Path
    manifest: Manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    torch.manual_seed(0)
    shape = (2, 4, 4)
    channel = Channel([SparseCoding(0.2), GaussianNoise(0.05), noise("laplace", shape)])
    model = SplitModel(
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Sigmoid()),
        channel,
        nn.Sequential(nn.Flatten(), nn.Linear(32, 3)),
    )
    model = with_stage_shapes(model, IMAGE).eval()
    folder = tmp_path_factory.mktemp("learned") / "e"
    manifest = export_model(model, IMAGE, folder, name="learned")
    return Learned(model, tuple(channel.stages), folder, manifest)


def pictures(n: int) -> torch.Tensor:
    return torch.rand(n, *IMAGE, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_sparse_coding_is_a_layer_of_the_exported_client(made: Learned) -> None:
    x = pictures(9)
    code = made.stages[0]
    z = made.model.encoder(x)
    found = load_half(made.folder, made.manifest, CLIENT, 1)(x.numpy())
    assert np.abs(found - code(z).numpy()).max() <= 1e-5
    assert np.abs(found - z.numpy()).max() > 0.05  # it does something
    assert [s["kind"] for s in made.manifest.stages] == ["gaussian", "learned"]


def test_learned_noise_travels_as_a_hashed_file(made: Learned) -> None:
    _, stage = made.manifest.stages
    trained = made.stages[2]
    assert isinstance(trained, LearnedNoise)
    assert trained.location is not None
    scale = trained.log_scales().exp().detach().numpy()
    assert stage == {
        "kind": "learned", "noise": "laplace", "file": "noise-1.f32",
        "std": pytest.approx(math.sqrt(2 * (scale**2).mean())),
    }  # fmt: skip
    assert "noise-1.f32" in made.manifest.files
    assert made.manifest.noise_std == pytest.approx(math.hypot(0.05, stage["std"]))
    _, read = read_stages(made.folder, read_manifest(made.folder))
    assert np.array_equal(read["scale"], scale)
    assert np.array_equal(read["location"], trained.location.detach().numpy())


def test_the_client_sends_what_the_trained_channel_sends(made: Learned) -> None:
    x = pictures(1)
    many = np.repeat(x.numpy(), 4000, 0)
    with Client(made.folder, "http://localhost:1", threads=1) as client:
        z = client._network(many)[0]
        sent = apply_stages(z, client._stages)
        assert client.send(x.numpy()).shape == (1, 2, 4, 4)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        theirs = made.model.channel(made.model.encoder(torch.from_numpy(many)), generator).numpy()
    for name in ("mean", "std"):
        ours, other = (getattr(rows, name)(0) for rows in (sent, theirs))
        # Standard errors of a Laplace sample's mean and spread, six of them and of two samples.
        allowed = 6 * math.sqrt(2 * (1 if name == "mean" else 5 / 4) / 4000) * theirs.std(0)
        assert (np.abs(ours - other) < allowed).all()


def test_a_server_answers_a_client_with_learned_stages(made: Learned) -> None:
    with (
        running(load_app(made.folder, threads=1)) as url,
        Client(made.folder, url, threads=1) as client,
    ):
        x = pictures(3).numpy()
        logits, sent = client.infer(x), client.send(x)
    with torch.no_grad():
        assert np.abs(logits - made.model.head(torch.from_numpy(sent)).numpy()).max() <= 1e-4


def test_a_changed_noise_file_or_a_false_total_is_refused(made: Learned, tmp_path: Path) -> None:
    for file in ("manifest.json", CLIENT, "noise-1.f32"):
        (tmp_path / file).write_bytes((made.folder / file).read_bytes())
    content = (tmp_path / "noise-1.f32").read_bytes()
    (tmp_path / "noise-1.f32").write_bytes(bytes(4) + content[4:])
    with pytest.raises(ExportError, match="not the file that was exported"):
        Client(tmp_path, "http://localhost:1")
    (tmp_path / "noise-1.f32").write_bytes(content)
    told = read_manifest(tmp_path)
    first, second = told.stages
    louder = replace(told, stages=(first, second | {"std": 2 * second["std"]}))
    (tmp_path / FILE).write_text(louder.to_json())
    with pytest.raises(ExportError, match=r"adds noise of std .* the manifest says"):
        Client(tmp_path, "http://localhost:1")


STAGE = {"kind": "learned", "noise": "gaussian", "file": "noise-0.f32", "std": 5.0}


def test_learned_noise_has_its_scale_and_place() -> None:
    content = pack_noise(np.array([1.0, 7.0]), np.array([0.5, -2.0]))
    stage = with_noise(STAGE, content, (2,))
    z = np.zeros((20_000, 2), np.float32)
    sent = apply_stages(z, [stage])
    assert sent.dtype == np.float32
    assert np.abs(sent.mean(0) - [0.5, -2.0]).max() < 6 * 7 / math.sqrt(20_000)
    assert np.abs(sent.std(0) / [1, 7] - 1).max() < 6 / math.sqrt(2 * 20_000)
    with pytest.raises(ExportError, match=r"numbers of noise-0\.f32 are missing"):
        apply_stages(z, [STAGE])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\0" * 12, "has 12 bytes, expected 16"),
        (pack_noise(np.array([1.0, 0.0]), np.zeros(2)), "a number that is not finite, or a scale"),
        (
            pack_noise(np.array([1.0, np.nan]), np.zeros(2)),
            "a number that is not finite, or a scale",
        ),
        (pack_noise(np.array([1.0, 7.0]), np.array([0.0, np.inf])), "not finite"),
        (pack_noise(np.array([1.0, 6.0]), np.zeros(2)), "the manifest says 5.0"),
    ],
)
def test_noise_that_is_not_the_stages_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        with_noise(STAGE, content, (2,))


def test_laplace_numbers_have_mean_0_and_mean_magnitude_1() -> None:
    drawn = noise_steps(100_000, "laplace") / STEPS
    assert abs(drawn.mean()) < 6 * math.sqrt(2 / 100_000)
    assert abs(np.abs(drawn).mean() - 1) < 6 / math.sqrt(100_000)
    assert abs(np.square(drawn).mean() - 2) < 6 * math.sqrt(20 / 100_000)
    assert mean_std(np.array([3.0]), "laplace") == pytest.approx(3 * math.sqrt(2))


def test_sparse_coding_behind_another_stage_is_refused() -> None:
    code = SparseCoding(0.1)
    model = SplitModel(nn.Flatten(), Channel([GaussianNoise(0.1), code]), nn.Linear(16, 2))
    with pytest.raises(ExportError, match="SparseCoding cannot be exported after another"):
        stages_json(export_parts(model, IMAGE).channel)
    first = SplitModel(nn.Flatten(), Channel([code, GaussianNoise(0.1)]), nn.Linear(16, 2))
    parts = export_parts(first, IMAGE)
    encoder, stages = parts.client, parts.channel
    assert stages_json(stages) == ({"kind": "gaussian", "std": 0.1},)
    assert code.shape is None  # the caller's own is left as it was
    assert encoder(pictures(2)).shape == (2, 16)


def test_every_defences_channel_can_be_exported() -> None:
    from splitveil.defences.catalogue import DEFENCES

    for name, defence in DEFENCES.items():
        model = SplitModel(nn.Flatten(), defence.channel(0.1), nn.Linear(16, 2))
        stages = stages_json(export_parts(model, IMAGE).channel)
        assert Manifest(
            name=name, image_shape=IMAGE, wire_shape=(16,), num_classes=2, stages=stages
        ).noise_std >= 0  # fmt: skip
