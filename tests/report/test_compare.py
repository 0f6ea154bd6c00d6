"""Several records as tables: rows, seeds, tracks, and what makes rows incomparable."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_records import grouped, one, put, record

from splitveil.errors import RunError
from splitveil.record.groups import Group, Records, find_records
from splitveil.report.columns import (
    COMPARE,
    EVERYTHING,
    Compared,
    Published,
    read_published,
    reported,
)
from splitveil.report.comparison import (
    ARCHITECTURE,
    BUDGET,
    REST,
    TEST90,
    caption,
    track_table,
    tracks,
    warnings,
)
from splitveil.table import Table


def all_tables(
    found: Records, published: dict[str, Published]
) -> list[tuple[Table, Sequence[Any]]]:
    return [track_table(track, published) for track in tracks(found.groups)]


def cells(group: Group, published: dict[str, Published] | None = None) -> dict[str, str]:
    (row,) = COMPARE.cells([Compared(group, reported(group, published or {}))])
    return dict(zip([str(c.heading) for c in COMPARE.columns], row, strict=True))


def test_seeds_are_gathered_into_their_row_and_runs_are_rows(tmp_path: Path) -> None:
    put(tmp_path / "results" / "veil" / "seed0", record(0.90))
    put(tmp_path / "results" / "veil" / "seed1", record(0.92))
    alone = put(tmp_path / "runs" / "mine", record(0.80))
    found = find_records([tmp_path / "results", alone])
    assert [(g.name, len(g.records)) for g in found.groups] == [("veil", 2), ("mine", 1)]
    assert found.broken == {}


def test_attack_seeds_are_averaged_within_a_training_seed(tmp_path: Path) -> None:
    put(tmp_path / "veil" / "seed0", record(mse=0.040))
    put(tmp_path / "veil" / "seed0" / "attack1", record(mse=0.044, attack=1))
    put(tmp_path / "veil" / "seed1", record(mse=0.050, seed=1))
    put(tmp_path / "veil" / "seed1" / "attack1", record(mse=0.054, seed=1, attack=1))
    (group,) = find_records([tmp_path]).groups
    assert group.values("strongest.mse") == pytest.approx([0.042, 0.052])
    assert cells(group)["strongest attack MSE"] == "0.0470 ± 0.0071"  # sd .01/√2
    assert cells(group)["seeds"] == "2×2"
    uneven = Group("u", (group.seeds[0], group.seeds[1][:1]))
    assert cells(uneven)["seeds"] == "2×1–2"


def test_namesakes_and_other_attackers_are_not_mixed(tmp_path: Path) -> None:
    put(tmp_path / "digits" / "veil" / "seed0", record(dataset="digits"))
    put(tmp_path / "cifar10" / "veil" / "seed0", record())
    put(tmp_path / "cifar10" / "veil" / "seed1", record(aux="test90", seed=1))
    found = find_records([tmp_path])
    assert [(g.name, len(g.records)) for g in found.groups] == [
        ("cifar10/veil", 1),
        ("cifar10/veil", 1),
        ("digits/veil", 1),
    ]


def test_a_row_is_mean_and_sd_over_seeds() -> None:
    row = cells(grouped("veil", ((record(0.90, 0.050),), (record(0.92, 0.052),))))
    assert row["accuracy"] == "91.00 ± 1.41"
    assert row["strongest attack MSE"] == "0.0510 ± 0.0014"
    assert row["seeds"] == "2"
    assert row["rate"] == "–"
    assert row["client MMAC"] == "19.9"
    assert row["reported MSE"] == ""


def test_a_flag_counts_once_over_seeds_and_a_dash_is_not_asked() -> None:
    raised = record() | {"flags": [{"name": "a"}, {"name": "b"}]}
    assert cells(grouped("x", ((raised,), (raised,))))["flags"] == "2"
    assert cells(one("x"))["flags"] == "0"
    old = record()
    del old["flags"]
    assert cells(grouped("x", ((old,),)))["flags"] == "–"


def test_reported_stands_beside_measured(tmp_path: Path) -> None:
    file = tmp_path / "published.json"
    row = {"accuracy": 0.8762, "mse": 0.033, "source": "CEM paper", "dataset": "cifar10"}
    file.write_text(json.dumps({"arl+cem": row}), encoding="utf-8")
    published = read_published(file)
    assert published == {"arl+cem": Published(0.8762, 0.033, "CEM paper", "cifar10")}
    row_of_stack = cells(one("arl-cem"), published)
    assert (row_of_stack["reported accuracy"], row_of_stack["reported MSE"]) == ("87.62", "0.0330")
    assert reported(one("arl-cem", record(aux="test90")), published) is None
    assert reported(one("arl-cem", record(dataset="digits")), published) is None
    file.write_text('{"a": {"mse": 1}}', encoding="utf-8")
    with pytest.raises(RunError, match="not a file of published rows"):
        read_published(file)


def test_rows_stand_in_the_tracks_they_fit_least_private_first() -> None:
    groups = [
        one("thin", record(mse=0.05)),
        one("vgg", record(mse=0.01, net="vgg11", macs=21_233_664)),
        one("large-vgg", record(mse=0.02, net="vgg11", macs=30_000_000)),
        one("wide", record(net="client:wide", macs=22_000_000)),
        one("report", record(aux="test90")),
    ]
    made = {t.title: [g.name for g in t.groups] for t in tracks(groups)}
    assert made == {
        ARCHITECTURE: ["vgg", "large-vgg"],
        BUDGET: ["vgg", "thin"],
        REST: ["wide"],
        TEST90: ["report"],
    }


def test_other_datasets_and_attackers_are_tracks_of_their_own() -> None:
    groups = [one("a", record(dataset="digits")), one("b"), one("c", record(aux="held-out"))]
    titles = [t.title for t in tracks(groups)]
    assert titles == [
        "digits: Rows on digits",
        f"cifar10: {BUDGET}",
        f"cifar10: {BUDGET}; aux = held-out",
    ]


def test_the_caption_comes_from_the_records_and_names_exceptions() -> None:
    other = record()
    other["config"]["epochs"] = 160
    groups = [one("a"), one("b"), grouped("long", ((other,), (other,), (other,)))]
    said = caption(groups)
    assert "80 epochs (160: `long`)" in said
    assert "`standard` audit; 1 attacks; aux = train; 10,000 scored images" in said
    assert said.endswith("Fewer than three training seeds: all but `long`.")
    more = Group("more", groups[-1].seeds)
    assert caption([*groups, more]).endswith("Fewer than three training seeds: `a`, `b`.")
    assert caption([one("a")]).endswith("**One training seed each: directions, not results.**")
    assert "trained on train+val" in caption([one("a", record(final=True))])


def test_rows_under_test90_stand_beside_what_the_seeds_report() -> None:
    said = Published(
        0.8535, 0.0436, "R3", "cifar10", aux="test90", ssim_zeropad=0.4316, psnr_pooled=13.6
    )
    found = Records((one("cem-test90", record(aux="test90")),))
    ((table, rows),) = all_tables(
        found, {"cem-test90": said, "cem": Published(0.9, 0.1, "x", "cifar10")}
    )
    digits = one("cem-test90", record(aux="test90", dataset="digits"))
    ((elsewhere, alone),) = all_tables(Records((digits,)), {"cem-test90": said})
    assert [line[-1] for line in elsewhere.cells(alone)] == ["measured"]
    measured, published = (
        dict(zip([c.heading for c in table.columns], line, strict=True))
        for line in table.cells(rows)
    )
    assert measured["accuracy on reconstructions"] == "26.00"
    assert measured["zero-pad SSIM"] == "0.4000"
    assert published["task accuracy"] == "85.35"
    assert published["accuracy on reconstructions"] == "–"
    assert (published["zero-pad SSIM"], published["pooled PSNR"]) == ("0.4316", "13.60")


def test_the_markdown_has_a_line_per_row_and_as_many_cells(tmp_path: Path) -> None:
    put(tmp_path / "a", record())
    put(tmp_path / "b", record())
    ((table, rows),) = all_tables(find_records([tmp_path]), {})
    lines = table.titled("").render(rows, "markdown").splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| `a` | thin-resnet | 1 | 90.00 |")


def test_broken_records_are_named_and_the_rest_is_compared(tmp_path: Path) -> None:
    put(tmp_path / "good", record())
    for name, content in (("cut", '{"accuracy": '), ("other", "[1]"), ("empty", "{}")):
        put(tmp_path / name, {}).write_text(content, encoding="utf-8")
    found = find_records([tmp_path])
    assert [g.name for g in found.groups] == ["good"]
    assert [Path(name).parent.name for name in found.broken] == ["cut", "empty", "other"]
    assert sum("not a record" in line for line in warnings(found)) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"accuracy": "high"}, "`accuracy` must be a number, got str"),
        ({"strongest": {"mse": [1]}}, "`strongest.mse` must be a number"),
        ({"strongest": 3}, "it has no strongest"),
        ({"client": 3}, "`client` must be an object"),
        ({"attacks": [1]}, "`attacks` must be an object"),
        ({"flags": ["noisy"]}, "`flags[0]` must be an object"),
        ({"per_image": {"mse": "!"}}, "must be base64"),
    ],
)
def test_a_record_of_another_kind_is_skipped_with_the_reason(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    put(tmp_path / "good", record())
    put(tmp_path / "odd", record() | change)
    found = find_records([tmp_path])
    assert [g.name for g in found.groups] == ["good"]
    (line,) = warnings(found)
    assert line.startswith(f"skipped, not a record: {tmp_path / 'odd' / 'record.json'} (")
    assert reason in line


def test_a_record_that_is_met_twice_counts_once(tmp_path: Path) -> None:
    file = put(tmp_path / "a", record())
    found = find_records([tmp_path, file, file.parent, tmp_path / "a" / ".." / "a"])
    assert [len(g.records) for g in found.groups] == [1]


def test_columns_can_be_chosen_for_every_track() -> None:
    group = one("cem-test90", record(aux="test90"))
    said = {"cem-test90": Published(0.85, 0.04, "R3", "cifar10", aux="test90")}
    (track,) = tracks([group])
    table, rows = track_table(track, said, EVERYTHING.only("row", "epochs", "mse"))
    assert [c.heading for c in table.columns] == ["row", "epochs", "strongest attack MSE"]
    assert table.cells(rows) == [["`cem-test90`", "80", "0.0500"]]
    assert table.notes == ()
    table, _ = track_table(track, said, EVERYTHING.only("reported-mse"))
    assert table.notes == ("Reported: R3.",)


def test_a_row_for_other_programs_is_not_rounded() -> None:
    seeds = [record(0.1, 1 / 3, net="vgg11"), record(0.2, net="vgg11")]
    seeds[1]["strongest"]["mse"] = None
    for seed in seeds:
        seed["config"]["noise_std"] = 0.1
        del seed["flags"]
    group = grouped("a", tuple((seed,) for seed in seeds))
    shown = EVERYTHING.only("row", "accuracy", "mse", "noise", "net", "seeds", "flags", "remark")
    assert shown.exact([Compared(group)]) == [
        {
            "row": "a",
            "accuracy": pytest.approx(0.15),
            "accuracy_sd": pytest.approx(0.1 / 2**0.5),
            "mse": 1 / 3,
            "mse_sd": None,
            "noise": 0.1,
            "net": "vgg11",
            "seeds": 2.0,
            "flags": None,
            "remark": None,
        }
    ]


def test_nothing_to_compare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no record\.json in .*; audit a run first"):
        find_records([tmp_path])
    put(tmp_path / "a", {})
    with pytest.raises(RunError, match="is a record; audit the runs again"):
        find_records([tmp_path])
