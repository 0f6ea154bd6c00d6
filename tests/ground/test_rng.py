"""Named streams: independent, repeatable, and without a trace in torch's global state."""

import pytest
import torch

from splitveil.rng import derive_seed, load_states, normal_like, save_states, seeded_globals, stream


def test_streams_depend_on_seed_and_name_only() -> None:
    def first(seed: int, name: str) -> float:
        return torch.rand(1, generator=stream(seed, name)).item()

    assert first(0, "a") == first(0, "a")
    assert len({first(0, "a"), first(0, "b"), first(1, "a")}) == 3
    assert 0 <= derive_seed(0, "a") < 2**63


def test_states_round_trip_with_the_global_stream() -> None:
    generators = {"x": stream(0, "x")}
    torch.rand(3, generator=generators["x"])
    saved = save_states(generators)
    expected = torch.rand(2, generator=generators["x"]), torch.rand(2)
    load_states(generators, saved)
    assert torch.equal(torch.rand(2, generator=generators["x"]), expected[0])
    assert torch.equal(torch.rand(2), expected[1])


def test_normal_like_keeps_type_and_shape() -> None:
    like = torch.zeros(2, 3, dtype=torch.float64)
    noise = normal_like(like, stream(0, "n"))
    assert (noise.dtype, noise.shape) == (torch.float64, (2, 3))
    assert torch.equal(noise, normal_like(like, stream(0, "n")))


def test_seeded_globals_repeats_inside_and_is_undone_outside() -> None:
    state = torch.get_rng_state()
    with seeded_globals(7):
        one = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    with seeded_globals(7):
        assert torch.equal(torch.rand(3), one)
    with seeded_globals(8):
        assert not torch.equal(torch.rand(3), one)


def test_seeded_globals_is_undone_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(KeyError), seeded_globals(0):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)
