"""The three laws of the maths page hold in the records that the results page shows for them."""

import statistics

from paper.tables import found, last_epochs
from splitveil.record.groups import Group


def rows(folder: str) -> dict[str, Group]:
    return {group.name: group for group in found(folder).groups}


def errors(group: Group) -> list[float]:
    return [value for value in group.values("strongest.mse") if value is not None]


def last_epoch(row: str, key: str) -> list[float]:
    """A diagnostic of the last epoch of every seed."""
    return [log[key] for log in last_epochs("digits-laws", row).values()]


def test_a_statistic_without_scale_protects_like_noise_alone() -> None:
    known = rows("cifar10")
    noise = max(errors(known["noise"]))
    for name in ("gated-att", "slot-cross"):
        assert max(errors(known[name])) < 1.05 * noise, name
    for name in ("cem", "veil-vgg11"):
        assert min(errors(known[name])) > 2 * noise, name


def test_an_estimator_that_lowers_itself_sees_little_of_the_rate() -> None:
    known = rows("digits-laws")
    for name in ("rate-minimise", "slots-projected"):
        assert max(last_epoch(name, "surrogate_to_true")) < 0.1, name
        assert max(errors(known[name])) < min(errors(known["rate-uniform"])), name
    for name in ("rate-maximise", "rate-uniform"):
        assert min(last_epoch(name, "surrogate_to_true")) >= 1 - 1e-3, name
    assert max(last_epoch("rate-minimise", "effective_sample_size")) < 0.25


def test_depth_protects_more_than_width_at_equal_cost() -> None:
    known = rows("cifar10")
    wide, deep = known["veil-vgg11"], known["veil-fast"]
    assert min(errors(deep)) > 2 * max(errors(wide))
    costs = [group.mean("client.macs") or 0.0 for group in (deep, wide)]
    assert costs[0] <= costs[1]
    one, other = (dict(group.records[0].config) for group in (deep, wide))
    differ = {key for key in one.keys() & other.keys() if one[key] != other[key]}
    assert differ <= {"net", "name", "compile"}


def test_a_run_with_other_threads_lies_several_sd_off() -> None:
    usual = errors(rows("digits")["veil"])
    least = min(errors(rows("digits-threads")["veil-2-threads"]))
    assert least < statistics.mean(usual) - 3 * statistics.stdev(usual)
