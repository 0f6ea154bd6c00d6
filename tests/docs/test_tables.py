"""The tables of the pages say what the code does."""

import dataclasses
import json
import re
from importlib import import_module
from typing import Any

import pytest
from documents import ROOT, read, sections, table
from typer.main import get_command

import splitveil as sv
from splitveil.attacks.catalogue import ATTACKS
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.profiles import PROFILES
from splitveil.audits.flags import FLAGS
from splitveil.cli.app import app
from splitveil.defences.catalogue import DEFENCES

STEPS = [
    "features", "grouping", "weights", "statistic", "floor, threshold", "gates",
    "penalty of a class", "sum over classes", "schedule", "gradient route", "what it cannot see",
    "cost",
]  # fmt: skip
SETTING = re.compile(r"^\| `(\w+)`(?: \(`(--[\w-]+)`\))? \| (.+?) \|", re.MULTILINE)
HAN = re.compile(r"[\u4e00-\u9fff]")


def resolve(name: str) -> Any:  # noqa: ANN401 - whatever the documents name
    """The object at a dotted name inside the package."""
    found: Any = import_module("splitveil")
    path = "splitveil"
    for part in name.split("."):
        path += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else import_module(path)
    return found


def test_the_budgets_of_the_protocol_are_those_of_the_code() -> None:
    printed = {
        row[0]: (row[1], *map(int, row[2:6]), row[6], int(row[7]), *map(float, row[8:10]), row[10])
        for row in table(read("reference/protocol.md"), "profile")
    }
    real = {}
    for name, attacks in PROFILES.items():
        few = {"decoder-small", "decoder-large", "decoder-perceptual", "gan"}
        left_out = {"quick": {"decoder-large", "gan"}, "laptop": few, "standard": {"gan"}}
        left_out["demo"] = few | {"decoder-ssim", "rmle", "prior", "k-query"}
        assert set(ATTACKS) - set(attacks) == left_out.get(name, set())
        d = attacks["decoder"]
        assert isinstance(d, Decoder)
        real[name] = (
            *(d.net, d.blocks, d.width, d.epochs, d.min_steps),
            "–" if d.max_steps is None else str(d.max_steps),
            *(d.batch_size, d.lr, d.weight_decay, d.schedule),
        )
    assert printed == real


def test_the_attacks_of_the_page_are_those_of_the_code() -> None:
    text = read("reference/attacks.md")
    printed = {row[0]: row[1] for row in table(text, "attack")}
    paper = PROFILES["paper"]
    assert printed == {name: str(paper[name].access) for name in ATTACKS}
    below = " ".join([*sections(text), *sections(text).values()])
    assert not [name for name in ATTACKS if name not in below]


def test_the_seconds_of_the_attacks_are_those_of_the_records() -> None:
    rows = {row[0]: row[1:] for row in table(read("reference/attacks.md"), "attack, seconds")}
    for place, folder in enumerate(("digits", "cifar10")):
        record = sv.Record.from_dict(
            json.loads((ROOT / "results" / folder / "veil" / "seed0" / "record.json").read_text())
        )
        took = {name: f"{attack.seconds:.1f}" for name, attack in record.attacks.items()}
        assert {name: cells[place] for name, cells in rows.items() if cells[place] != "–"} == took


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_is_explained(flag: str) -> None:
    text = sections(read("reference/flags.md"))[flag]
    for words in ("Raised if", "Explanation", "What to do"):
        assert words in text, f"'{words}' is missing under '{flag}'"


def settings() -> dict[str, tuple[str, str]]:
    """Option and default of each setting, as printed."""
    found = SETTING.findall(read("guides/settings.md"))
    return {key: (option, default) for key, option, default in found}


def test_the_settings_are_the_fields_with_their_defaults() -> None:
    fields = [field.name for field in dataclasses.fields(sv.RunConfig)]
    assert [*settings(), "settings"] == fields
    for key, (_, default) in settings().items():
        value = getattr(sv.RunConfig, key)
        told = str(value).lower() if isinstance(value, bool) else str(value)
        assert value is None or default.strip("`") == told, key


def test_the_settings_have_the_options_of_train() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {word for param in commands["train"].params for word in param.opts}
    for key, (option, _) in settings().items():
        own = f"--{key.replace('_', '-')}"
        assert option == (own if own in options else ""), key


def test_every_step_of_the_terms_names_its_code() -> None:
    rows = table(read("reference/terms.md"), "step")
    assert [row[0] for row in rows] == STEPS
    for _, chinese, *methods, code in rows:
        assert HAN.search(chinese)
        assert len(methods) == 4
        assert all(methods)
        names = re.findall(r"[\w./]+", code.replace("`", ""))
        assert names
        for name in names:
            assert (ROOT / name).is_file() if "/" in name else callable(resolve(name)), name


def test_the_symbols_of_the_maths_name_their_code() -> None:
    rows = table(read("reference/maths.md"), "section")
    assert len(rows) > 20
    for row in rows:
        names = re.findall(r"[\w.]+", row[-1].replace("`", ""))
        assert all(callable(resolve(name)) for name in names), row


def test_the_schedules_of_the_maths_are_those_of_the_presets() -> None:
    text = read("reference/maths.md").split("## Schedules")[1]
    printed: dict[str, tuple[Any, ...]] = {}
    for names, lambd, scale, warmup, first, w_lr, ramp, _ in table(text, "preset"):
        facts = (float(lambd), float(scale), int(warmup), first == "skipped", w_lr, float(ramp))
        printed |= dict.fromkeys(re.findall(r"[a-z][a-z-]+", names.split(" (")[0]), facts)
    plans = {name: DEFENCES[name].penalty_plan() for name in printed}
    assert {"cem", "gated-att", "slot-cross", "veil"} < set(printed)
    assert printed == {
        name: (p.lambd, p.scale, p.warmup_epochs, p.skip_first_epoch, p.w_lr, p.ramp)
        for name, p in plans.items()
    }


def test_the_glossary_is_sorted_and_in_two_languages() -> None:
    rows = table(read("reference/glossary.md"), "term")
    terms = [row[0].lower() for row in rows]
    assert terms == sorted(set(terms))
    assert len(terms) >= 60
    for term, chinese, meaning in rows:
        assert HAN.search(chinese), term
        assert meaning.endswith("."), term
