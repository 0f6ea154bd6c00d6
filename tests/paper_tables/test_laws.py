"""The three laws of the maths page hold in the records that the results page shows for them."""

import json
import statistics
from pathlib import Path

from splitveil.record.groups import Group, find_records

RESULTS = Path(__file__).parents[2] / "results"


def rows(folder: str) -> dict[str, Group]:
    return {group.name: group for group in find_records([RESULTS / folder]).groups}


def errors(group: Group) -> list[float]:
    found = group.values("strongest.mse")
    return [value for value in found if value is not None]


def last_epoch(row: str, key: str) -> list[float]:
    """A diagnostic of the last epoch of every seed."""
    paths = sorted((RESULTS / "digits-laws" / row).glob("seed*/last_epoch.json"))
    return [json.loads(path.read_text(encoding="utf-8"))[key] for path in paths]


def test_a_statistic_without_scale_protects_no_more_than_the_noise() -> None:
    found = rows("cifar10")
    noise = max(errors(found["noise"]))
    for name in ("gated-att", "slot-cross"):
        assert max(errors(found[name])) < 1.05 * noise, name
    for name in ("cem", "veil-vgg11"):
        assert min(errors(found[name])) > 2 * noise, name


def test_an_estimator_that_lowers_its_own_estimate_sees_a_small_part_of_the_rate() -> None:
    found = rows("digits-laws")
    for name in ("rate-minimise", "slots-projected"):
        assert max(last_epoch(name, "surrogate_to_true")) < 0.1, name
        assert max(errors(found[name])) < min(errors(found["rate-uniform"])), name
    for name in ("rate-maximise", "rate-uniform"):
        assert min(last_epoch(name, "surrogate_to_true")) >= 1 - 1e-3, name
    assert max(last_epoch("rate-minimise", "effective_sample_size")) < 0.25


def test_a_deep_thin_client_protects_more_than_a_wide_one_at_its_cost() -> None:
    found = rows("cifar10")
    wide, deep = found["veil-vgg11"], found["veil-fast"]
    assert min(errors(deep)) > 2 * max(errors(wide))
    costs = [group.mean("client.macs") or 0.0 for group in (deep, wide)]
    assert costs[0] <= costs[1]
    one, other = (dict(group.records[0].config) for group in (deep, wide))
    differ = {key for key in one.keys() & other.keys() if one[key] != other[key]}
    assert differ <= {"net", "name", "compile"}


def test_a_run_of_other_threads_lies_several_sd_off() -> None:
    usual = errors(rows("digits")["veil"])
    least = min(errors(rows("digits-threads")["veil-2-threads"]))
    assert least < statistics.mean(usual) - 3 * statistics.stdev(usual)
