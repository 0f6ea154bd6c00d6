"""The README: its numbers come from record files, its code runs, its commands exist."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_records(script: ModuleType) -> None:
    """Run `python scripts/readme.py` when this fails."""
    assert script.with_tables(README) == README


def test_records_are_what_the_captions_say() -> None:
    for path in (ROOT / "results").glob("*/*/seed*/record.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        config, audit = record["config"], record["audit"]
        expected = {
            "digits": (60, "quick", "train", 359, 64, 0.05),
            "cifar10": (80, "standard", "train", 10_000, 512, 0.025),
        }[config["dataset"]]
        noise = config["noise_std"] or expected[5]
        wire = record["client"]["wire_floats"]
        facts = (config["epochs"], audit["profile"], audit["aux"], audit["scored"], wire, noise)
        assert facts == expected, path
        assert path.parent.name == f"seed{config['seed']}"
        assert path.parent.parent.name.startswith(config["defence"])
        assert not {"data_dir", "runs_dir"} & set(config)


def test_the_cost_of_veil_in_the_text_is_that_of_the_table() -> None:
    def accuracy(row: str) -> float:
        path = ROOT / "results" / "cifar10" / row / "seed0" / "record.json"
        return float(json.loads(path.read_text(encoding="utf-8"))["accuracy"])

    cost = re.search(r"cost\s+of\s+(\d+\.\d)\s+points of accuracy on\s+CIFAR-10", README)
    assert cost is not None
    assert float(cost[1]) == round(100 * (accuracy("noise-thin-resnet") - accuracy("veil")), 1)


def test_slot_cross_was_shut_off_as_the_text_says() -> None:
    path = ROOT / "results" / "cifar10" / "slot-cross" / "seed0" / "last_epoch.json"
    line = json.loads(path.read_text(encoding="utf-8"))
    mean = re.search(r"hard gate mean (\.\d+) against a limit of (\.\d+)", README)
    assert mean is not None
    assert float(mean[1]) == round(line["hard_gate"], 2) > float(mean[2])
    assert line["shut"] == 1.0


def test_links_resolve() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
