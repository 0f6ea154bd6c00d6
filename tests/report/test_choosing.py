"""Which rows are shown and in which order: filters, sorting, columns."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.errors import ConfigError
from splitveil.report.choosing import View, chosen, ordered, parse_filters, parse_order
from splitveil.report.published import Published
from splitveil.report.quantities import QUANTITIES, STANDARD, parse_columns, plain_row
from splitveil.report.rows import Found, Group


def record(
    accuracy: float | None = 0.9, mse: float | None = 0.05, net: str | None = "vgg11"
) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "strongest": {"mse": mse, "mse_by": "decoder"},
        "config": {"net": net, "defence": "veil", "dataset": "cifar10", "noise_std": 0.1},
        "audit": {"aux": "train", "profile": "standard"},
        "client": {"macs": 20_000_000, "wire_floats": 512},
    }


def row(name: str, *seeds: dict[str, Any]) -> Group:
    return Group(name, tuple((seed,) for seed in seeds or (record(),)))


def allowed(text: str, *groups: Group) -> list[str]:
    conditions = parse_filters(text)
    return [g.name for g in groups if all(c.allows(g) for c in conditions)]


def names(groups: tuple[Group, ...]) -> list[str]:
    return [g.name for g in groups]


LOW, MIDDLE, HIGH = (row(n, record(a)) for n, a in (("low", 0.8), ("middle", 0.9), ("high", 1.0)))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("accuracy>.9", ["high"]),
        ("accuracy>=.9", ["middle", "high"]),
        ("accuracy < 90%", ["low"]),
        ("accuracy<=0.9", ["low", "middle"]),
        ("accuracy=.9", ["middle"]),
        ("accuracy==9e-1", ["middle"]),
        ("accuracy!=.9", ["low", "high"]),
        ("row!=low and accuracy<1", ["middle"]),
        ("row=*i*", ["middle", "high"]),
        ("row=mid", []),
    ],
)
def test_a_filter_keeps_the_rows_that_meet_it(text: str, kept: list[str]) -> None:
    assert allowed(text, LOW, MIDDLE, HIGH) == kept


def test_a_number_is_the_mean_over_seeds_and_a_text_that_of_all_records() -> None:
    both = row("both", record(0.8, net="vgg11"), record(1.0, net="thin-deep"))
    assert allowed("accuracy=.9", both) == ["both"]
    assert allowed("net=vgg11", both) == []
    assert allowed("net!=vgg11", both) == []
    assert allowed("net!=small", both) == ["both"]
    assert allowed("net=*", both) == ["both"]


def test_a_row_without_the_number_meets_no_filter_on_it() -> None:
    unknown = row("unknown", record(None, net=None))
    assert allowed("accuracy>0", unknown) == allowed("accuracy!=.5", unknown) == []
    assert allowed("net=*", unknown) == []
    assert allowed("net!=vgg11", unknown) == ["unknown"]


def test_a_star_is_the_only_wildcard() -> None:
    odd = row("client:[3].*x")
    assert allowed("row=client:[3].*", odd) == ["client:[3].*x"]
    assert allowed("row=client:.3..x", odd) == []


values = st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=8)


@given(values, st.floats(0, 1))
def test_below_and_not_below_share_out_the_rows_with_a_number(
    numbers: list[float | None], limit: float
) -> None:
    groups = [row(str(i), record(v)) for i, v in enumerate(numbers)]
    below, rest = (allowed(f"accuracy{sign}{limit!r}", *groups) for sign in ("<", ">="))
    assert not set(below) & set(rest)
    assert sorted(below + rest) == sorted(str(i) for i, v in enumerate(numbers) if v is not None)


@given(values, st.booleans())
def test_sorting_permutes_puts_what_is_missing_last_and_keeps_ties_in_order(
    numbers: list[float | None], descending: bool
) -> None:
    groups = [row(str(i), record(v)) for i, v in enumerate(numbers)]
    order = parse_order("-accuracy" if descending else "accuracy")
    made = [int(g.name) for g in ordered(groups, order, {})]
    sign = -1 if descending else 1
    slow = sorted(
        range(len(numbers)),
        key=lambda i: (numbers[i] is None, sign * (numbers[i] or 0.0), i),
    )
    assert made == slow


def test_ties_are_sorted_by_the_next_column() -> None:
    groups = [
        row("a", record(0.9, 0.01, "vgg11")),
        row("b", record(0.9, 0.05, "thin")),
        row("c", record(0.8, 0.03, "thin")),
    ]
    assert names(ordered(groups, parse_order("net,-mse"), {})) == ["b", "c", "a"]
    assert names(ordered(groups, parse_order("-net, accuracy"), {})) == ["a", "c", "b"]
    said = {"a": Published(0.7, 0.02, "s", "cifar10"), "c": Published(0.6, 0.02, "s", "cifar10")}
    assert names(ordered(groups, parse_order("reported-accuracy"), said)) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acuracy>1", "unknown filter 'acuracy'; did you mean 'accuracy'"),
        ("accuracy", "KEY OP VALUE, got 'accuracy'; OP is one of"),
        ("accuracy>", "KEY OP VALUE"),
        (">3", "KEY OP VALUE"),
        ("", "KEY OP VALUE"),
        ("accuracy>good", "accuracy is a number, got 'good'; write for example accuracy>=0.5"),
        ("accuracy>nan", "accuracy is a number, got 'nan'"),
        ("net>vgg11", "net is a text, got 'net>vgg11'; compare it with = or !="),
        ("net=a and mse", "KEY OP VALUE, got 'mse'"),
    ],
)
def test_a_filter_that_says_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_filters(text)
    assert message in str(caught.value)


def test_unknown_columns_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown column 'zzz'; choose from: accuracy, aux, by"):
        parse_columns("mse,zzz")
    with pytest.raises(ConfigError, match="unknown column to sort by 'sim'; did you mean 'ssim'"):
        parse_order("-sim")


def test_filters_are_joined_and_the_row_compared_against_stays() -> None:
    found = Found((LOW, MIDDLE, HIGH), ("x",), ("why",))
    view = View(where=parse_filters("accuracy>.8 and accuracy<1"))
    made = chosen(found, view, {})
    assert (names(made.groups), made.broken, made.reasons) == (["middle"], ("x",), ("why",))
    view = View(where=parse_filters("accuracy>.9"), against="low")
    assert names(chosen(found, view, {}).groups) == ["low", "high"]
    with pytest.raises(ConfigError, match="unknown row to compare against 'lo'; did you mean 'lo"):
        chosen(found, View(against="lo"), {})


def test_when_nothing_is_left_the_message_says_what_there_is() -> None:
    found = Found((LOW, HIGH), ())
    with pytest.raises(
        ConfigError, match=r"no row has accuracy < 0.5; accuracy lies in \[0.8, 1\]"
    ):
        chosen(found, View(where=parse_filters("accuracy<50%")), {})
    with pytest.raises(ConfigError, match=r"no row has net = small; net is vgg11\. Loosen"):
        chosen(found, View(where=parse_filters("net=small"), against="low"), {})
    with pytest.raises(ConfigError, match="none has a rate"):
        chosen(found, View(where=parse_filters("rate<1")), {})


def test_columns_begin_with_the_row_and_each_fits_the_terminal() -> None:
    made = parse_columns("mse, epochs ,row,mse")
    assert [q.key for q in made] == ["row", "mse", "epochs"]
    assert [q.column.brief for q in made] == ["row", "MSE ↑", "epochs"]
    assert {q.key for q in STANDARD} < set(QUANTITIES)


def test_a_plain_row_is_not_rounded() -> None:
    group = row("a", record(0.1, 1 / 3), record(0.2, None))
    made = plain_row(group, parse_columns("accuracy,mse,noise,net,seeds,flags"), {})
    assert made == {
        "row": "a",
        "accuracy": pytest.approx(0.15),
        "accuracy_sd": pytest.approx(0.1 / 2**0.5),
        "mse": 1 / 3,
        "mse_sd": None,
        "noise": 0.1,
        "net": "vgg11",
        "seeds": 2.0,
        "flags": None,
    }
