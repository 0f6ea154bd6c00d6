"""What can be had without looking at z, against numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from splitveil.attacks.baseline import ClassMean, MeanImage, class_means
from splitveil.errors import AuditError
from splitveil.threat import Labelled, Observation, Victim

MakeAux = Callable[..., Labelled]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def seen(answers: list[int]) -> Observation:
    return Observation(torch.full((len(answers), 7), float("nan")), torch.tensor(answers))


def test_class_means_of_three_images_by_hand() -> None:
    images = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1)
    means = class_means(Labelled(images, torch.tensor([1, 1, 3])), 4)
    assert means.flatten().tolist() == [0.5, 0.25, 0.5, 1.0]  # 0 and 2 are absent: overall mean


def test_class_means_are_numpys(make_aux: MakeAux) -> None:
    aux = make_aux(100, (3, 5, 6))
    x, y = aux.images.double().numpy(), aux.labels.numpy()
    expected = np.stack([x[y == c].mean(0) for c in range(3)] + [x.mean(0)] * 2)
    np.testing.assert_allclose(class_means(aux, 5).numpy(), expected, atol=1e-6)


def test_the_mean_attack_answers_numpys_mean(make_aux: MakeAux, linear_victim: Victim) -> None:
    aux = make_aux(50)
    guess = MeanImage().fit(linear_victim.black_box(), aux, generator())(seen([0, 0, 2]))
    expected = np.broadcast_to(aux.images.double().numpy().mean(0), (3, 1, 4, 4))
    np.testing.assert_allclose(guess.numpy(), expected, atol=1e-6)


def test_class_mean_returns_the_mean_of_the_predicted_class(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    aux = make_aux(50)
    answers = [2, 0, 1, 1, 6]
    guess = ClassMean().fit(linear_victim.black_box(), aux, generator())(seen(answers))
    x, y = aux.images.double().numpy(), aux.labels.numpy()
    expected = [x[y == c].mean(0) if c < 3 else x.mean(0) for c in answers]
    np.testing.assert_allclose(guess.numpy(), np.stack(expected), atol=1e-6)


@pytest.mark.parametrize("attack", [MeanImage(), ClassMean()], ids=repr)
def test_one_image_is_enough_and_none_is_too_few(
    attack: MeanImage | ClassMean, make_aux: MakeAux, linear_victim: Victim
) -> None:
    box = linear_victim.black_box()
    aux = make_aux(1)
    guess = attack.fit(box, aux, generator())(seen([0, 1]))
    assert torch.equal(guess, aux.images.expand(2, -1, -1, -1))
    with pytest.raises(AuditError, match="at least 1 aux image, got 0"):
        attack.fit(box, make_aux(0), generator())
