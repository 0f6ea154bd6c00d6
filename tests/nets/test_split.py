"""Cutting changes nothing; counting disturbs nothing."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.catalogue import small, vgg11
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.split import Cost, SplitModel, check_layout, cut


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 3))


def one_relu_many_times() -> nn.Sequential:
    relu = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 6), relu, nn.Linear(6, 6), relu)


def with_batchnorm_and_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(20, 2),
    )


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 2))


BACKBONES = {
    "two_layers": two_layers,
    "mlp": mlp,
    "with_batchnorm_and_dropout": with_batchnorm_and_dropout,
    "one_relu_many_times": one_relu_many_times,
}


def seeded_images(n: int, *shape: int) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


def stir(model: nn.Module, x: Tensor) -> None:
    """Give BatchNorm statistics other than those it is born with."""
    model.train()
    with torch.no_grad():
        model(x)
    model.eval()


def check_every_cut(backbone: nn.Sequential, x: Tensor) -> None:
    stir(backbone, x)
    with torch.no_grad():
        whole = backbone(x)
        for at in range(1, len(backbone)):
            model = cut(backbone, at)
            assert torch.equal(model.head(model.encoder(x)), whole), f"at={at}"
            assert torch.equal(model(x), whole), f"at={at}"


@pytest.mark.parametrize("name", BACKBONES)
def test_server_of_client_is_the_backbone_at_every_cut(name: str) -> None:
    check_every_cut(BACKBONES[name](), seeded_images(5, 3, 4, 4))


def test_server_of_client_is_vgg11_at_every_cut() -> None:
    check_every_cut(vgg11((3, 32, 32), 10), seeded_images(2, 3, 32, 32))


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_the_parts_own_the_backbones_parameters_and_no_others(at: int) -> None:
    backbone = with_batchnorm_and_dropout()
    model = cut(backbone, at)
    assert {id(p) for p in model.parameters()} == {id(p) for p in backbone.parameters()}
    for parameter in backbone.parameters():
        parameter.data.fill_(0.5)
    assert all(bool((p == 0.5).all()) for p in model.parameters())


@pytest.mark.parametrize("at", [0, -1, 4, 5])
def test_a_cut_that_leaves_one_side_empty_names_the_range(at: int) -> None:
    with pytest.raises(ConfigError, match=rf"in 1\.\.3, because .* 4 children .*; got {at}"):
        cut(mlp(), at)


@pytest.mark.parametrize("shape", [(8, 8), (1, 32, 32), ()])
def test_an_image_that_does_not_pass_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    model = cut(with_batchnorm_and_dropout(), 2)
    for count in (model.macs, model.wire_shape, model.wire_floats):
        with pytest.raises(
            ConfigError, match=rf"cannot process an input of shape {re.escape(repr(shape))}"
        ):
            count(shape)


def test_a_backbone_of_one_child_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match="of one child cannot be cut"):
        cut(nn.Sequential(nn.Linear(2, 2)), 1)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, groups=4)


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("module", "shape", "macs"),
    [
        (nn.Conv1d(3, 5, 3), (3, 10), 8 * 5 * 9),
        (Convolved(), (4, 6, 6), 16 * 8 * 9),
        (nn.ConvTranspose2d(4, 8, 3, stride=2, groups=2), (4, 6, 6), 36 * 4 * 4 * 9),
        (Attends(), (4, 16, 8), 2 * 4 * 16 * 16 * 8),
        # Four projections, the scores and their mix, two linear maps.
        (
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
            (16, 64),
            4 * 16 * 64 * 64 + 2 * 16 * 16 * 64 + 2 * 16 * 64 * 128,
        ),
    ],
)
def test_every_product_is_counted_whatever_calls_it(
    module: nn.Module, shape: tuple[int, ...], macs: int
) -> None:
    fast = torch.backends.mha.get_fastpath_enabled()
    assert Cost.of(module, shape).macs == macs
    assert Cost.of(module.to("meta"), shape).macs == macs
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_what_is_compiled_costs_what_it_is() -> None:
    model = SplitModel(mlp()[:2], Channel(), mlp()[2:])
    assert model.compiled("eager").macs((3, 4, 4)) == model.macs((3, 4, 4)) == 48 * 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.first(x))
        return out


def test_a_model_that_is_no_chain_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("needs a plain nn.Sequential, got Residual; wrap")
    ):
        cut(Residual(), 1)


def test_the_channel_acts_between_the_parts() -> None:
    model = cut(mlp(), 2, Channel([GaussianNoise(0.5)]))
    x = seeded_images(4, 3, 4, 4)
    z, z_sent, logits = model.split_forward(x, torch.Generator().manual_seed(3))
    noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(z, model.encoder(x))
    assert torch.equal(z_sent, z + 0.5 * noise)
    assert torch.equal(logits, model.head(z_sent))
    assert torch.equal(logits, model(x, torch.Generator().manual_seed(3)))


# Multiply-adds by hand: output positions x weights behind each, bias not counted.
@pytest.mark.parametrize(
    ("layer", "input_shape", "macs"),
    [
        (nn.Linear(7, 5), (7,), 35),
        (nn.Linear(7, 5), (3, 7), 3 * 35),
        (nn.Conv2d(3, 4, 3), (3, 8, 8), 4 * 6 * 6 * 3 * 9),
        (nn.Conv2d(3, 4, 3, padding=1, bias=False), (3, 8, 8), 4 * 8 * 8 * 3 * 9),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 8, 8), 6 * 4 * 4 * 2 * 9),
        (nn.Conv2d(4, 4, 5, padding=2, groups=4), (4, 6, 6), 4 * 6 * 6 * 25),
        (nn.Conv2d(3, 4, (1, 3)), (3, 4, 8), 4 * 4 * 6 * 3 * 3),
        (nn.ConvTranspose2d(3, 5, 2, stride=2), (3, 4, 4), 3 * 4 * 4 * 5 * 4),
        (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), (4, 5, 5), 4 * 5 * 5 * 3 * 9),
        (nn.BatchNorm2d(3), (3, 8, 8), 0),
        (nn.MaxPool2d(2), (3, 8, 8), 0),
    ],
)
def test_multiply_adds_of_one_layer(
    layer: nn.Module, input_shape: tuple[int, ...], macs: int
) -> None:
    assert Cost.of(layer, input_shape).macs == macs


def test_multiply_adds_of_a_layer_used_twice_count_twice() -> None:
    shared = nn.Linear(4, 4)
    assert Cost.of(nn.Sequential(shared, nn.Tanh(), shared), (4,)).macs == 2 * 16


def test_only_the_clients_half_is_counted() -> None:
    model = cut(mlp(), 2)
    assert model.macs((3, 4, 4)) == 48 * 6
    assert (model.wire_shape((3, 4, 4)), model.wire_floats((3, 4, 4))) == ((6,), 6)
    assert model.client_params() == 48 * 6 + 6


def count_everything(model: SplitModel) -> None:
    model.macs((1, 8, 8))
    model.wire_shape((1, 8, 8))
    model.wire_floats((1, 8, 8))


@pytest.mark.parametrize("training", [True, False])
def test_counting_leaves_no_trace(training: bool) -> None:
    model = cut(small((1, 8, 8), 10), 1)
    stir(model, seeded_images(4, 1, 8, 8))
    model.train(training)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    count_everything(model)
    assert all(m.training is training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_client_in_double_precision_can_be_counted() -> None:
    model = cut(mlp().double(), 2)
    assert (model.macs((3, 4, 4)), model.wire_floats((3, 4, 4))) == (48 * 6, 6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
def test_a_compiled_model_computes_the_same() -> None:
    model = cut(with_batchnorm_and_dropout(), at=2).eval()
    twin = model.compiled(backend="aot_eager").eval()
    x = seeded_images(4, 3, 4, 4)
    plain, fused = model.split_forward(x), twin.split_forward(x)
    torch.testing.assert_close(fused.z, plain.z)
    torch.testing.assert_close(fused.logits, plain.logits)
    given = torch.autograd.grad(fused.logits.sum(), list(model.parameters()))
    expected = torch.autograd.grad(plain.logits.sum(), list(model.parameters()))
    torch.testing.assert_close(given, expected)


class Viewed(nn.Module):
    """A layer as it is often written."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def test_a_layer_that_views_a_map_is_explained_before_the_training() -> None:
    images, conv, classify = (3, 8, 8), nn.Conv2d(3, 4, 3, padding=1), nn.Linear(256, 2)
    check_layout(cut(nn.Sequential(conv, nn.Flatten(), classify), 1), images)
    with pytest.raises(ConfigError, match=r"write x.flatten\(1\) or x.reshape"):
        check_layout(cut(nn.Sequential(conv, Viewed(), classify), 1), images)
