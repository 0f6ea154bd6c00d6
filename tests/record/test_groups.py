"""Runs that differ in their seeds alone: how they are called, and their one colour."""

from dataclasses import replace

from made_runs import MakeRun, make_record
from matplotlib.colors import to_hex

from splitveil.record.files import RunFiles
from splitveil.record.groups import kinds
from splitveil.report.canvas import colour
from splitveil.report.figures import PER_PANEL, attack_bars, scatter

SEEDS = 3


def made(make_run: MakeRun, defence: str, seed: int, **config: object) -> RunFiles:
    record = make_record(defence, seed)
    record["config"] |= config
    name = "-".join([defence, *(f"{k}{v}" for k, v in config.items()), f"s{seed}"])
    return make_run(name, record=record, gallery=None, metrics=None)


def test_seeds_form_one_group_named_after_the_defence(make_run: MakeRun) -> None:
    runs = [made(make_run, d, seed) for seed in range(SEEDS) for d in ("none", "veil")]
    found = kinds([*runs, made(make_run, "gated-att", 0)])
    assert [(kind.name, len(kind.runs)) for kind in found] == [
        ("none", 3), ("veil", 3), ("gated-att-s0", 1),
    ]  # fmt: skip
    assert [len(seed) for seed in found[0].seeds] == [1, 1, 1]


def test_other_settings_of_a_defence_get_names_of_runs(make_run: MakeRun) -> None:
    runs = [made(make_run, "veil", seed, **more) for more in ({}, {"loud": 1}) for seed in (0, 1)]
    assert [kind.name for kind in kinds(runs)] == ["veil", "veil-loud1"]


def test_unaudited_runs_are_groups_of_their_own(make_run: MakeRun) -> None:
    runs = [make_run(name, record=None, gallery=None) for name in ("a", "b")]
    assert [kind.name for kind in kinds(runs)] == ["a", "b"]


def test_a_defence_has_one_colour_in_all_panels(make_run: MakeRun) -> None:
    defences = ("none", "gated-att", "veil")
    runs = [made(make_run, d, seed, n=n) for seed in range(SEEDS) for d in defences for n in (1, 2)]
    figure = attack_bars(runs)._figure
    assert len(figure.axes) == len(runs) // (PER_PANEL // SEEDS * SEEDS)
    seen: dict[str, set[str]] = {}
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        inks = [to_hex(patch.get_facecolor()).lower() for patch in legend.get_patches()]
        bars = [to_hex(patch.get_facecolor()).lower() for patch in axes.patches]
        assert set(bars) == set(inks)
        assert len(set(inks)) == len(inks)  # no two kinds of a panel share one
        for text, ink in zip(legend.get_texts(), inks, strict=True):
            seen.setdefault(text.get_text(), set()).add(ink)
    assert len(seen) == 6
    assert all(len(inks) == 1 for inks in seen.values())


def test_many_seeds_of_a_defence_keep_their_colour_over_panels(make_run: MakeRun) -> None:
    runs = [made(make_run, "veil", seed) for seed in range(PER_PANEL + 2)]
    axes = attack_bars(runs)._figure.axes
    assert len(axes) == 2
    inks = {to_hex(patch.get_facecolor()).lower() for one in axes for patch in one.patches}
    assert inks == {colour(0).lower()}


def test_seeds_share_the_mark_of_the_trade_off(make_run: MakeRun) -> None:
    runs = [made(make_run, "veil", seed) for seed in range(SEEDS)]
    lines = [one for one in scatter(runs)._figure.axes[0].lines if one.get_marker() != "None"]
    assert {(one.get_color(), one.get_marker()) for one in lines} == {(colour(0), "o")}
    other = [*runs, replace(made(make_run, "none", 0))]
    assert len({one.get_color() for one in scatter(other)._figure.axes[0].lines[:4]}) == 2
