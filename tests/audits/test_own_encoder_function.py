"""A stranger's function as a module: what it is given, what it may return, its randomness."""

import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits.made import labelled
from torch import Generator, Tensor, nn

from splitveil.audits.own_encoder import Server, UserFunction, as_rows, seeded, wrap
from splitveil.errors import AuditError, ConfigError

IMAGES = labelled(6, 0).images


def numpy_noise(x: np.ndarray) -> np.ndarray:
    return np.asarray(x.reshape(len(x), -1) + 0.1 * np.random.standard_normal((len(x), 64)))


def torch_noise(x: Tensor) -> Tensor:
    return x.flatten(1) + 0.1 * torch.randn_like(x.flatten(1))


def plain_noise(x: np.ndarray) -> list[list[float]]:
    return [[float(image.mean()) + random.gauss(0, 0.1)] for image in x]


def states() -> list[Any]:
    return [str(np.random.get_state()), random.getstate(), torch.get_rng_state().tolist()]


def test_the_global_streams_are_put_back_even_after_a_failure() -> None:
    before = states()

    def fail() -> None:
        np.random.standard_normal()
        random.gauss(0, 1)
        torch.rand(1)
        raise KeyError

    with pytest.raises(KeyError), seeded(1):
        fail()
    assert states() == before


class Arrayed:
    """As arrays of other frameworks: it is none, but gives one."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:  # noqa: ANN401
        del dtype, copy
        return np.array([[0.5, 1.0], [2.0, 4.0]])


@pytest.mark.parametrize(
    "answer",
    [
        [[0.5, 1], [2, 4]],
        np.array([[0.5, 1.0], [2.0, 4.0]], dtype=">f8"),
        np.array([[0.5, 1.0], [2.0, 4.0]], dtype=np.float16),
        [np.array([0.5, 1.0]), np.array([2.0, 4.0])],
        torch.tensor([[0.5, 1.0], [2.0, 4.0]], dtype=torch.float64, requires_grad=True),
        torch.tensor([[0.5, 1.0], [2.0, 4.0]], dtype=torch.bfloat16),
        Arrayed(),
    ],
    ids=["list", "big-endian", "half", "list of arrays", "double tensor", "bfloat16", "__array__"],
)
def test_answers_of_every_kind_become_float32_rows(answer: object) -> None:
    rows = as_rows(answer, 2, "f")
    assert rows.dtype == torch.float32
    assert not rows.requires_grad
    assert rows.tolist() == [[0.5, 1.0], [2.0, 4.0]]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "got a NoneType"),
        ((np.zeros(2), np.zeros(2)), "got a tuple"),
        ({"z": 1}, "got a dict"),
        ([[1.0], [1.0, 2.0]], "a list that is no array"),
        (np.zeros(2, dtype=complex), "of complex128"),
        (torch.zeros(2, dtype=torch.complex64), "torch.complex64"),
        (["a", "b"], "a list of <U1"),
        (1.0, r"returned shape \(\) for 2 inputs"),
        (np.zeros((3, 4)), r"returned shape \(3, 4\) for 2 inputs"),
        (np.zeros((2, 0)), r"returned shape \(2, 0\) for 2 inputs"),
    ],
)
def test_answers_that_are_no_rows_are_refused(answer: object, said: str) -> None:
    with pytest.raises(AuditError, match=said):
        as_rows(answer, 2, "f")


@pytest.mark.parametrize(
    ("axes", "shape"),
    [((), (1,)), ((5,), (5,)), ((2, 3), (6,)), ((1, 2, 3), (1, 2, 3)), ((1, 1, 2, 3), (6,))],
)
def test_rows_have_a_form_that_attacks_take(axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    stranger = UserFunction(lambda x: np.ones((len(x), *axes)), "f", "numpy")
    assert stranger(IMAGES).shape == (6, *shape)
    assert stranger.shape == axes


def test_a_shape_that_changes_between_calls_is_refused() -> None:
    stranger = UserFunction(lambda x: np.ones((len(x), len(x))), "f", "numpy")
    stranger(IMAGES)
    with pytest.raises(AuditError, match=r"changed its output shape: \(2,\) per image, .* \(6,\)"):
        stranger(IMAGES[:2])


@pytest.mark.parametrize("place", ["numpy", "cpu"])
def test_a_function_that_writes_into_its_input_changes_no_image(place: str) -> None:
    def spoil(x: Any) -> Any:  # noqa: ANN401 - an array or a tensor
        x[:] = 0
        return x

    images = IMAGES.clone()
    assert UserFunction(spoil, "f", place)(images).abs().max() == 0
    assert torch.equal(images, IMAGES)


def test_a_reused_output_changes_no_earlier_answer() -> None:
    for buffer in (np.zeros((6, 2), np.float32), torch.zeros(6, 2)):

        def count(x: object, kept: Any = buffer) -> Any:  # noqa: ANN401 - an array or a tensor
            kept += 1
            return kept

        stranger = UserFunction(count, "f", "numpy")
        first, second = stranger(IMAGES), stranger(IMAGES)
        assert (first.unique().tolist(), second.unique().tolist()) == ([1.0], [2.0])


@pytest.mark.parametrize(
    ("client", "place"), [(numpy_noise, "numpy"), (torch_noise, "cpu"), (plain_noise, "numpy")]
)
def test_global_noise_follows_the_generator_and_leaves_no_trace(client: Any, place: str) -> None:  # noqa: ANN401
    stranger, stream = UserFunction(client, "f", place), Generator().manual_seed(1)
    before = states()
    first, second = stranger(IMAGES, stream), stranger(IMAGES, stream)
    assert torch.equal(first, stranger(IMAGES, Generator().manual_seed(1)))
    assert not torch.equal(first, second)
    assert states() == before


def test_a_function_with_a_generator_argument_is_given_the_stream() -> None:
    def tensors(x: Tensor, generator: Generator) -> Tensor:
        return torch.rand(len(x), 2, generator=generator)

    def arrays(x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        return generator.random((len(x), 2))

    drawn = UserFunction(tensors, "f", "cpu")(IMAGES, Generator().manual_seed(4))
    assert torch.equal(drawn, torch.rand(6, 2, generator=Generator().manual_seed(4)))
    stranger = UserFunction(arrays, "f", "numpy")
    first, again = (stranger(IMAGES, Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.unique().numel() == 12


def test_how_a_function_wants_its_input_is_found_out() -> None:
    assert wrap(numpy_noise, "f", "auto", IMAGES, 0).place == "numpy"
    assert wrap(torch_noise, "f", "auto", IMAGES, 0).place == "cpu"
    assert wrap(lambda x: x, "f", "torch", IMAGES, 0).place == "cpu"
    with pytest.raises(AuditError, match="given numpy arrays, TypeError"):
        wrap(torch_noise, "f", "numpy", IMAGES, 0)

    def broken(x: object) -> object:
        raise KeyError(type(x).__name__)

    said = "'f' failed: given numpy arrays, KeyError: 'ndarray' .* given tensors on cpu, KeyError"
    with pytest.raises(AuditError, match=said):
        wrap(broken, "f", "auto", IMAGES, 0)
    for wrong in (3, nn.Flatten):
        with pytest.raises(ConfigError, match="must be a function"):
            wrap(wrong, "f", "auto", IMAGES, 0)


def test_a_module_is_audited_in_eval_mode_and_left_alone() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 2)).train()
    stranger = wrap(net, "f", "auto", IMAGES, 0)
    expected = net[2](net[0](IMAGES))
    assert torch.equal(stranger(IMAGES, Generator().manual_seed(0)), expected.detach())
    assert net.training
    assert net[2].weight.requires_grad


def test_a_server_gives_scores_or_classes_for_the_clients_shape() -> None:
    seen = []

    def scores(z: np.ndarray) -> np.ndarray:
        seen.append(z.shape)
        return np.eye(4)[[1, 3]]

    z = torch.zeros(2, 6)
    wire = (2, 3)
    assert Server(UserFunction(scores, "s", "numpy", wire), 4)(z).argmax(1).tolist() == [1, 3]
    assert seen == [(2, 2, 3)]
    for ids in ([1, 3], [[1], [3]], torch.tensor([1, 3])):
        server = Server(UserFunction(lambda z, ids=ids: ids, "s", "numpy", wire), 4)
        assert server(z).argmax(1).tolist() == [1, 3]
    for bad in ([0, 4], [0, -1], [0.5, 0.0], np.zeros((2, 3)), np.full(2, np.nan)):
        with pytest.raises(AuditError, match=r"must return scores \(n, 4\) or class ids"):
            Server(UserFunction(lambda z, bad=bad: bad, "s", "numpy", wire), 4)(z)


def test_what_a_stranger_changes_around_us_is_put_back(tmp_path: Path) -> None:
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), Path.cwd())

    def rude(x: np.ndarray) -> np.ndarray:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.chdir(tmp_path)
        return x

    for generator in (None, Generator().manual_seed(0)):
        UserFunction(rude, "rude", "numpy")(IMAGES, generator)
        assert (torch.get_default_dtype(), torch.is_grad_enabled(), Path.cwd()) == before


def test_a_stranger_cannot_end_the_process() -> None:
    def quits(x: np.ndarray) -> None:
        raise SystemExit(len(x) * 0)

    with pytest.raises(AuditError, match="SystemExit: 0"):
        wrap(quits, "quits", "auto", IMAGES, 0)


def test_quantised_tensors_and_scores_that_are_nan_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to retire them
        coded = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)
    with pytest.raises(AuditError, match="must return one array or tensor of real numbers"):
        as_rows(coded, 2, "f")
    says_nan = UserFunction(lambda z: np.full((len(z), 4), np.nan), "s", "numpy", (3,))
    server = Server(says_nan, 4)
    with pytest.raises(AuditError, match="'s' answered with NaN as a score"):
        server(torch.zeros(2, 3))
