"""Sentences about our rows are written by hand; `paper/claims.toml` says where each number is from.

When a test fails, the sentence or the record changed: correct the sentence, then its claim.
"""

import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paper.tables import (
    BLOCK,
    PAGES,
    ROOT,
    SUMMARY,
    AtShare,
    found,
    last_epochs,
    published,
    rows_of,
)
from splitveil.record.groups import Group, aux_of, mean_of
from splitveil.report.columns import LEAKS
from splitveil.report.comparison import compare_records
from splitveil.report.gains import (
    beside,
    everything_sent,
    exposure_over,
    gains,
    nothing_sent,
    over_chord,
)

CLAIMS: Mapping[str, Any] = tomllib.loads((ROOT / "paper" / "claims.toml").read_text("utf-8"))
RESULTS = ROOT / "docs" / "project" / "results.md"
WRITTEN = [*PAGES, RESULTS]
NUMBER = re.compile(r"(?<![\w.,-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?")  # CIFAR-10 is a name
CODE = re.compile(r"`[^`]*`")
# What an early exit is with nothing sent and with everything, and what is read of it.
ENDS: Mapping[str, tuple[Callable[[Group], Group | None], str]] = {
    "own_accuracy": (nothing_sent, "accuracy"),
    "all_accuracy": (everything_sent, "accuracy"),
    "all_exposure": (everything_sent, "exposure"),
}
# Shares in a record, printed in per cent or in points.
SHARES = (
    "accuracy", "attacks.decoder.accuracy", "leakage", "re-id-wire", "re-id-encoder", "sent",
    "leakage_sent", "exposure", *ENDS,
)  # fmt: skip
LEAK_COLUMNS = {column.key: column for column in LEAKS.columns}
BASES = ("DistCorr", "dropout", "patrol", "ResSFL", "nopeek", "arl")  # with a row `+cem`, `+veil`
PAIRS = [("cem", "veil-vgg11"), *((f"{base}+cem", f"{base}+veil") for base in BASES)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """What is written by hand, in one line: no blocks, no fenced code, no targets of links."""
    text = BLOCK.sub(" ", page.read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```|^\d+\. ", " ", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).replace("[", "").replace("]", "").split())


def group(place: str) -> Group:
    folder, _, row = place.partition("/")
    return next(g for g in found(folder).groups if g.name == row)


def values(place: str, field: str) -> list[float | None]:
    """A field of a row for each training seed, in per cent where it is a share."""
    if field.startswith("epoch."):
        logs = last_epochs(*place.split("/")).values()
        return [log[field.removeprefix("epoch.")] for log in logs]
    if field in ENDS:  # an early exit with nothing sent, or with everything
        change, path = ENDS[field]
        changed = change(group(place))
        assert changed is not None, place
        return values_of(changed, path, 100)
    column = LEAK_COLUMNS.get(field)
    read = column.value(group(place)) if column else group(place).values(field)
    return [None if v is None else v * (100 if field in SHARES else 1) for v in read]


def values_of(row: Group, field: str, scale: float) -> list[float | None]:
    return [None if v is None else v * scale for v in row.values(field)]


def end(limits: tuple[float, float] | None, which: str) -> float:
    assert limits is not None
    return limits[which == "high"]


def gained(place: str, *which: str) -> float:
    made = gains(group(place), found(place.partition("/")[0]).groups).over_best
    assert made is not None, place
    return end(made.limits, which[0]) if which else made.points


def exposed(place: str, which: str) -> float:
    made = exposure_over(group(place))
    assert made is not None, place
    return 100 * end(made[1], which)


def at_share(place: str, sent: str, field: str, *sd: str) -> float:
    told = 100 * np.array(AtShare(group(place), float(sent)).values(field))
    return float(told.std(ddof=1) if sd else told.mean())


OF_AN_EXIT: Mapping[str, Callable[..., float]] = {
    "gain": gained, "exposure": exposed, "share": at_share,
}  # fmt: skip


def mean(place: str, field: str) -> float:
    value = mean_of(values(place, field))
    assert value is not None, (place, field)
    return value


def sourced(source: str) -> float:
    """The number that a source of `claims.toml` stands for."""
    match source.split():
        case ["count", *name]:
            return COUNTS[" ".join(name)]()
        case ["published", row, field]:
            return float(getattr(published()[row], field)) * (100 if field in SHARES else 1)
        case ["gain" | "exposure" | "share" as what, place, *more]:
            return OF_AN_EXIT[what](place, *more)
        case [first, "-", second, field]:
            return mean(first, field) - mean(second, field)
        case [place, field]:
            return mean(place, field)
        case [place, field, "sd"]:
            return statistics.stdev(v for v in values(place, field) if v is not None)
    raise AssertionError(f"unknown source: {source}")


def ahead(row: str, other: str, field: str) -> bool:
    """Whether a row of Table 1 has more of a field than another one has."""
    return mean(f"cifar10-table1/{row}", field) > mean(f"cifar10-table1/{other}", field)


def above(row: str, field: str, said: str) -> bool:
    """Whether a row of Table 1 has more of a field than is published of a row."""
    key = "mse" if field == "strongest.mse" else field
    return mean(f"cifar10-table1/{row}", field) > sourced(f"published {said} {key}")


def least_found() -> float:
    """The smallest share of images found again in a row of CIFAR-10 other than `veil`."""
    rows = [g for g in rows_of("cifar10") if g.name not in ("veil", "none-paper")]
    fields = ("re-id-wire", "re-id-encoder")
    every = [mean_of(values(f"cifar10/{g.name}", field)) for g in rows for field in fields]
    return float(int(min(v for v in every if v is not None)))


def sd_below() -> float:
    """How many sd below its mean the lowest of the runs of two threads lies, rounded down."""
    usual = [v for v in values("digits/veil", "strongest.mse") if v is not None]
    lowest = min(v for v in values("digits-threads/veil-2-threads", "strongest.mse") if v)
    return float(int((statistics.mean(usual) - lowest) / statistics.stdev(usual)))


COUNTS: Mapping[str, Callable[[], float]] = {
    "bases": lambda: len(PAIRS),
    "more private than CEM": lambda: sum(ahead(v, c, "strongest.mse") for c, v in PAIRS),
    "more accurate than CEM": lambda: sum(ahead(v, c, "accuracy") for c, v in PAIRS),
    "defences that came out more accurate and less private": lambda: sum(
        above(b, "accuracy", b) and not above(b, "strongest.mse", b) for b in BASES
    ),
    "rows with CEM worse than reported": lambda: sum(
        not above(c, "accuracy", c) and not above(c, "strongest.mse", c) for c, _ in PAIRS
    ),
    "more private than reported CEM": lambda: sum(above(v, "strongest.mse", c) for c, v in PAIRS),
    "more accurate than reported CEM": lambda: sum(above(v, "accuracy", c) for c, v in PAIRS),
    "both": lambda: sum(above(v, "accuracy", c) and above(v, "strongest.mse", c) for c, v in PAIRS),
    "least found in other rows": least_found,
    "sd that a run of two threads lies below": sd_below,
}


def numbers(phrase: str) -> list[str]:
    return NUMBER.findall(CODE.sub(" ", phrase))


def agrees(shown: str, value: float) -> bool:
    """Whether a number as printed is the value, rounded to as many decimals.

    >>> agrees("10,000", 10000.0), agrees("0.0574", 0.05735), agrees("92.3", 92.36)
    (True, True, False)
    """
    decimals = len(shown.partition(".")[2])
    return bool(abs(float(shown.replace(",", "")) - value) <= 0.5 * 10**-decimals + 1e-9)


@pytest.mark.parametrize("page", [ROOT / name for name in CLAIMS], ids=name_of)
def test_numbers_in_sentences_are_those_of_the_records(page: Path) -> None:
    text = prose(page)
    for claim in CLAIMS[name_of(page)].get("claims", ()):
        assert claim["says"] in text
        shown = numbers(claim["says"])
        assert len(shown) == len(claim["of"]), claim
        for number, source in zip(shown, claim["of"], strict=True):
            assert agrees(number, sourced(source)), (claim["says"], source, sourced(source))


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_no_number_in_a_sentence_is_without_a_source(page: Path) -> None:
    told, text = CLAIMS.get(name_of(page), {}), prose(page)
    phrases = [*told.get("plain", ()), *(claim["says"] for claim in told.get("claims", ()))]
    assert [p for p in phrases if p not in text] == []
    for phrase in sorted(phrases, key=len, reverse=True):
        text = text.replace(phrase, " ")
    assert numbers(text) == []


def test_verdicts_are_those_after_the_correction() -> None:
    made = compare_records(found("cifar10"), published())
    verdicts = {(c.ours, c.other): c.verdict for one in made for c in one.contrasts}
    for name, told in CLAIMS.items():
        text = prose(ROOT / name)
        for claim in told.get("verdicts", ()):
            assert claim["says"] in text
            said = {verdicts[claim["row"], other] for other in claim["against"]}
            assert said == {claim["verdict"]}, claim


def single(groups: Sequence[Group]) -> set[str]:
    return {g.name for g in groups if len(g.seeds) == 1}


def test_rows_with_one_seed_are_named() -> None:
    (listed,) = re.findall(r"## One seed only (.*?) have one training seed", prose(RESULTS))
    assert set(re.findall("`([^`]+)`", listed)) == single(found("cifar10").groups)
    for folder in ("cifar10-table1", "cifar10-seed-003"):
        assert single(found(folder).groups) == {g.name for g in found(folder).groups}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for row in single(found("cifar10").groups) & set(SUMMARY):
        assert re.search(rf"^\| `{row}` \|[^|]*\|[^|]*\| 1 \|", text, re.MULTILINE)


def test_what_is_said_of_all_rows_holds_for_all() -> None:
    """Certificates are vacuous, outputs tell membership, no white-box attack wins."""
    for row in rows_of("cifar10"):
        for record in row.records:
            for name in ("rmle", "prior"):
                attack = record.attacks.get(name)
                if attack is not None and attack.mse is not None and attack.beside.mse is not None:
                    assert attack.mse > attack.beside.mse, (row.name, name)
    for folder in ("cifar10", "digits"):
        for row in rows_of(folder):
            for key in ("gallery", "certified"):
                cell = LEAK_COLUMNS[key].cell(row)
                assert cell in ("–", "refused") or cell.endswith(", vacuous"), (row.name, cell)
    for row in rows_of("cifar10"):
        told = mean_of(LEAK_COLUMNS["member-outputs"].value(row))
        assert told is None or told > 0.54, row.name


def test_a_server_that_the_client_alone_beats_is_flagged_and_one_that_gains_is_not() -> None:
    for folder, trainings in (("cifar10", 2), ("cifar10-short", 1)):
        rows, flagship = found(folder).groups, group(f"{folder}/veil")
        made = gains(flagship, rows).over_best
        assert made is not None
        assert made.needless
        told = [beside(seed[0], rows).flag_names for seed in flagship.seeds]
        assert sum("server not needed" in names for names in told) == trainings
    for folder in ("cifar10-b1", "cifar10-b5"):
        for record in group(f"{folder}/early-exit").records:
            assert "server not needed" not in beside(record, found(folder).groups).flag_names


def test_what_is_said_of_the_small_clients_holds() -> None:
    for folder in ("cifar10-b1", "cifar10-b5"):
        rows = found(folder).groups
        known = {g.name: gains(g, rows).over_best for g in rows}
        sure = {name for name, made in known.items() if made is not None and made.sure}
        assert "early-exit" in sure
        assert sure <= {"early-exit", "early-exit+veil"}  # who sends everything gains nothing sure
        for name in ("early-exit", "early-exit+veil"):
            for record in group(f"{folder}/{name}").records:
                assert record.identified == pytest.approx(
                    record.sent
                )  # each sent one is recognised
                assert "exit tells the class" in record.flag_names
        ours = group(f"{folder}/early-exit")
        best = gains(ours, rows).best
        assert best is not None
        above = over_chord(ours, best, rows)
        assert above is not None
        assert above.sure
    noise, slot = (group(f"cifar10-b5/{name}").records[0] for name in ("noise", "slot-cross"))
    assert (noise.accuracy, noise.strongest.mse) == (slot.accuracy, slot.strongest.mse)


def test_what_is_said_of_table_1_holds() -> None:
    rows = {g.name: g for g in rows_of("cifar10-table1")}
    kept = {
        name: mean(f"cifar10-table1/{name}", "strongest.mse")
        / mean(f"cifar10-table1/{name}", "ceiling.mse")
        for name in rows
    }
    assert len(rows) == 22
    assert [name for name, share in kept.items() if share >= 0.5] == ["arl+veil"]
    arl = rows["arl+veil"].records[0]
    assert arl.attacks["k-query"].repeats == 16
    assert mean("cifar10-table1/arl+veil", "attacks.k-query.mse") < 0.5 * 0.0574
    silent = [b for b in ("none", *BASES) if mean(f"cifar10-table1/{b}", "config.noise_std") == 0]
    assert len(silent) == 4


def test_what_is_said_of_the_documents_rows_holds() -> None:
    rows = {g.name: g for g in found("cifar10-seed-003").groups}
    behind = {name for name in rows if "-wire" in name}
    flagged = {n for n, g in rows.items() for f in g.records[0].flags or () if "overfit" in f.name}
    assert flagged == set(rows) - behind
    assert "sparse" not in rows  # the layer without a penalty
    errors = {name: mean(f"cifar10-seed-003/{name}", "strongest.mse") for name in rows}
    assert max(errors[name] for name in errors if not name.startswith("sparse")) == errors["cem"]
    assert all(len(g.seeds) == 1 for g in rows.values())
    assert {g.name for g in rows.values() if aux_of(g) == "train"} == {
        "sparse+gated-att-wire-train"
    }


# R3's directions: whether gated attention has more of a field than CEM has.
REPORTED = {
    "strongest.mse": True, "strongest.ssim_zeropad": False, "strongest.psnr_pooled": False,
    "accuracy": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "hold"), [("gated-att-simple", set(REPORTED)), ("gated-att", {"accuracy"})]
)
def test_which_of_the_reported_directions_hold_with_the_layer(form: str, hold: set[str]) -> None:
    own, other = f"cifar10-seed-003/sparse+{form}", "cifar10-seed-003/sparse+cem"
    kept = {f for f, more in REPORTED.items() if (mean(own, f) > mean(other, f)) == more}
    assert kept == hold
    rebuilt = "attacks.decoder.accuracy"
    equal = abs(mean(own, rebuilt) - mean(other, rebuilt)) < 1.0  # points
    assert equal == (form == "gated-att-simple")
