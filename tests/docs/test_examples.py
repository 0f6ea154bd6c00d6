"""The example runs, and shows what it promises."""

import importlib.util
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_the_penalty_lowers_the_rate() -> None:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with torch.random.fork_rng([]):
        spec.loader.exec_module(module)
        results = module.main(epochs=15)
    plain, veiled = results["plain"], results["with the penalty"]
    assert plain[0] > 0.5
    assert veiled[1] < 0.7 * plain[1]


def test_exactly_three_lines_are_marked_as_added() -> None:
    assert EXAMPLE.read_text().count("# added line") == 3
