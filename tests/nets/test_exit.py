"""Early exit: the rule, its threshold, the tap, and what the device answers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.channel import Channel, SparseCoding
from splitveil.nets.clients import build_client, parse_client
from splitveil.nets.exit import (
    Exit,
    Policy,
    TappedClient,
    body_and_projection,
    fitted_temperature,
    least_share,
    own_head,
    sureness,
    tapped,
    threshold_for,
    unwrapped,
)
from splitveil.nets.split import SplitModel, cut

IMAGE = (1, 8, 8)
SPEC = parse_client("strided-8-8x2.16-c4")


def images(n: int = 40) -> Tensor:
    return torch.rand(n, *IMAGE, generator=torch.Generator().manual_seed(0))


def client() -> nn.Sequential:
    torch.manual_seed(0)
    return build_client(SPEC, IMAGE)


def exiting(policy: Policy | None = None, *, average: bool = False) -> SplitModel:
    body, projection = body_and_projection(client())
    rule = Exit(own_head(body, IMAGE, 3), 3, policy=policy, average=average)
    server = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    return SplitModel(TappedClient(body, projection, len(body)), Channel(), server, rule).eval()


def test_body_and_projection_together_are_the_client() -> None:
    whole, x = client().eval(), images()
    body, projection = body_and_projection(whole)
    assert [type(layer) for layer in projection] == [nn.Conv2d, nn.Sigmoid]
    assert torch.equal(projection.eval()(body.eval()(x)), whole(x))


def test_a_layer_of_a_defence_before_the_sigmoid_belongs_to_the_projection() -> None:
    code = SparseCoding(0.1)
    layers = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(1, 2, 3), code, nn.Sigmoid()))
    body, projection = body_and_projection(layers)
    assert (len(body), len(projection)) == (1, 3)


def test_a_client_of_another_kind_is_all_body() -> None:
    body, projection = body_and_projection(nn.Flatten())
    assert (len(body), len(projection)) == (1, 0)
    assert torch.equal(projection(images()), images())


def test_a_tapped_client_computes_body_and_wire_in_one_pass() -> None:
    whole = tapped(client(), 2, IMAGE).eval()
    x = images()
    z, features = whole.both(x)
    assert torch.equal(z, whole(x))
    assert torch.equal(features, whole.body(x))
    assert z.shape[1:] == (1, 8, 8), "as many numbers as the client sent from the end"


@pytest.mark.parametrize("tap", [0, 9, -1])
def test_a_tap_outside_the_body_is_refused(tap: int) -> None:
    with pytest.raises(ConfigError, match=r"tap must be in 1\.\.\d+.*got"):
        tapped(client(), tap, IMAGE)


def test_a_tapped_client_is_found_inside_a_cut_net() -> None:
    inner = tapped(client(), 2, IMAGE)
    model = cut(nn.Sequential(inner, nn.Flatten(), nn.Linear(64, 3)), at=1)
    assert unwrapped(model.encoder) is inner


def test_sureness_by_hand() -> None:
    logits = torch.tensor([[math.log(6.0), math.log(3.0), 0.0]])  # p = .6, .3, .1
    assert sureness(logits, "confidence").item() == pytest.approx(0.6)
    assert sureness(logits, "margin").item() == pytest.approx(0.3)
    entropy = -(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1))
    assert sureness(logits, "entropy").item() == pytest.approx(-entropy)
    assert sureness(1000 * logits, "entropy").item() == pytest.approx(0.0)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=60, unique=True), st.floats(0, 1))
def test_a_threshold_sends_the_share_that_is_least_sure(values: list[float], share: float) -> None:
    sure = torch.tensor(values, dtype=torch.float64)
    sent = sure < threshold_for(sure, share)
    assert int(sent.sum()) == round(share * len(values))
    if 0 < int(sent.sum()) < len(values):
        assert sure[sent].max() < sure[~sent].min()


@given(st.integers(0, 2**30), st.floats(0, 1))
def test_the_least_share_is_that_of_trying_every_share(seed: int, target: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    sure = torch.rand(12, generator=draws, dtype=torch.float64)
    here, there = (torch.rand(2, 12, generator=draws) < 0.6).unbind(0)

    def accuracy(count: int) -> float:
        sent = torch.zeros(12, dtype=torch.bool)
        sent[sure.argsort(stable=True)[:count]] = True
        return float(torch.where(sent, there, here).double().mean())

    enough = [count for count in range(13) if accuracy(count) >= target - 1e-9]
    if enough:
        assert least_share(sure, here, there, target) == enough[0] / 12
    else:
        with pytest.raises(ConfigError, match="cannot be reached: the best"):
            least_share(sure, here, there, target)


def test_the_temperature_is_that_of_a_fine_grid() -> None:
    draws = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(200, 4, generator=draws)
    labels = torch.where(torch.rand(200, generator=draws) < 0.6, logits.argmax(1), 0)
    found = fitted_temperature(logits, labels)

    def loss(t: float) -> float:
        return float(nn.functional.cross_entropy(logits.double() / t, labels))

    assert loss(found) <= min(loss(0.05 * 1.01**i) for i in range(600)) + 1e-9


def test_before_it_is_settled_everything_is_sent_and_the_server_answers() -> None:
    model, x = exiting(), images()
    answer, asked = model.answer(x)
    assert bool(asked.all())
    assert torch.equal(answer.argmax(1), model(x).argmax(1))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_settled_model_sends_its_share_and_answers_the_rest_itself(share: float) -> None:
    model, x = exiting(Policy(send=share)), images()
    own, server = model.both_answers(x)
    assert model.exit is not None
    model.exit.settle(own, server, torch.arange(40) % 3)
    answer, asked = model.answer(x)
    assert int(asked.sum()) == round(share * 40)
    expected = torch.where(asked, server.argmax(1), own.argmax(1))
    assert torch.equal(answer.argmax(1), expected)


def test_averaging_mixes_both_answers_only_where_it_asked() -> None:
    model, x = exiting(Policy(send=0.5), average=True), images()
    own, server = model.both_answers(x)
    assert model.exit is not None
    model.exit.settle(own, server, torch.arange(40) % 3)
    answer, asked = model.answer(x)
    t = float(model.exit.temperature)
    mine = nn.functional.log_softmax(own.double() / t, 1)
    both = (mine + nn.functional.log_softmax(server.double(), 1)) / 2
    torch.testing.assert_close(answer[asked], both[asked].float())
    torch.testing.assert_close(answer[~asked], mine[~asked].float())


def test_a_threshold_per_class_needs_images_of_every_class() -> None:
    model = exiting(Policy(send=0.5, per_class=True))
    own, server = model.both_answers(images())
    assert model.exit is not None
    with pytest.raises(ConfigError, match="at least 50 validation images"):
        model.exit.settle(own, server, torch.arange(40) % 3)
    draws = torch.Generator().manual_seed(2)
    own = torch.randn(900, 3, generator=draws)
    model.exit.settle(own, own, own.argmax(1))
    asked = model.exit.asks(own)
    for k in range(3):
        assert float(asked[own.argmax(1) == k].double().mean()) == pytest.approx(0.5, abs=0.01)


def test_without_validation_images_nothing_can_be_settled() -> None:
    rule = exiting().exit
    assert rule is not None
    with pytest.raises(ConfigError, match="without --final"):
        rule.settle(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0).long())


def test_a_model_without_own_head_says_how_to_get_one() -> None:
    model = SplitModel(nn.Flatten(), Channel(), nn.Linear(64, 3))
    with pytest.raises(ConfigError, match="--defence early-exit"):
        model.both_answers(images())
    logits, asked = model.answer(images())
    assert bool(asked.all())
    assert torch.equal(logits, model(images()))


def test_a_silent_model_sends_rows_without_numbers() -> None:
    model = SplitModel(nn.Flatten(), Channel(), nn.Linear(64, 3), silent=True)
    assert model.victim().send(images()).shape == (40, 0)
    logits, asked = model.answer(images())
    assert not bool(asked.any())
    assert torch.equal(logits, model(images()))
