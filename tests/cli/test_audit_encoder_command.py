"""`splitveil audit-encoder`: what a user of another framework types and sees."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cli.calling import TINY, call, text

from splitveil.attacks.profiles import PROFILES
from splitveil.audits.trained_run import differences

EXAMPLE = Path(__file__).parents[2] / "examples" / "foreign_encoder.py"
PAGE = Path(__file__).parents[2] / "docs" / "start" / "own-encoder.md"
CODE = """
import numpy as np

def good(x):
    return x.reshape(len(x), -1)[:, ::4] + 0.1 * np.random.standard_normal((len(x), 16))

def answer(z):
    return z[:, :10].argmax(1)

def wrong_batch(x):
    return np.zeros((len(x) + 1, 4))

def changing(x):
    return np.zeros((len(x), len(x)))

def two(x):
    return x, x

def late(x):
    if len(x) > 100:
        raise MemoryError("too many images")
    return x

def quiet(x):
    return x.reshape(len(x), -1)

def answers_wrongly(z):
    return np.full(len(z), 10)

def loud(x):
    print("hello")
    return good(x)

def rises(x):
    raise ValueError("weights are missing")

def bright(x):
    return x.mean(axis=(1, 2, 3)) > 0.3

def all_of_them(x):
    return np.ones(len(x))

def nothing(x):
    return np.zeros(len(x), bool)

def how_sure(x):
    return x.mean(axis=(1, 2, 3))

def scores(x):
    return np.zeros((len(x), 10))

def guess(x):
    return np.zeros(len(x))

class Encoder:
    pass

number = 3
"""
RUN = """
import splitveil
run = splitveil.load_run("runs/mine")
send, head = run.victim.send, run.model.head
"""


def record_of(folder: Path) -> Any:  # noqa: ANN401 - JSON
    return json.loads((folder / "record.json").read_text(encoding="utf-8"))


def save(name: str, first: int, last: int, classes: int = 2) -> str:
    """Some of a fixed list of random images, as an archive."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8)[first:last]
    np.savez(name, x=x, y=np.arange(len(x)) % classes)
    return f"npz:{name}.npz"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, under a name no other test has imported; tiny attacks."""
    name = f"code_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(cast(dict[str, Any], PROFILES), "smoke", TINY)
    return name


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example audited as its first lines say, under the smallest profile."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copy(EXAMPLE, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setitem(cast(dict[str, Any], PROFILES), "smoke", TINY)
        import foreign_encoder  # type: ignore[import-not-found]

        foreign_encoder.main()
        words: tuple[str, ...] = (
            "foreign_encoder:send",
            "--data",
            "npz:digits.npz",
            "--noise",
            "0.05",
        )
        result = call(
            "audit-encoder", *words, "--server", "foreign_encoder:answer", "--profile", "smoke"
        )
        assert result.exit_code == 0, text(result)
        assert "not run: rmle: white-box" in text(result)
        yield folder / "runs" / "send"


def test_the_example_is_audited_without_splitveil_in_it(example: Path) -> None:
    assert "import splitveil" not in EXAMPLE.read_text(encoding="utf-8")
    record = record_of(example)
    assert record["accuracy"] > 0.8
    linear = record["attacks"]["linear"]
    assert linear["mse"] < 0.6 * record["floor"]["mse"]  # four pixels' mean tells much
    assert "rmle" not in record["attacks"]
    assert record["audit"]["noise"]["measured"] == pytest.approx(0.05, rel=0.03)
    assert record["client"] == {"macs": None, "params": None, "stored": None, "wire_floats": 16}
    assert record["config"]["callable"] == "foreign_encoder:send"
    assert record["true_rate_nats"] > 0
    assert record["seconds"]["audit"] < 60


def test_report_and_compare_read_its_record(example: Path, tmp_path: Path) -> None:
    assert {"record.json", "gallery.json", "report.html"} <= {p.name for p in example.iterdir()}
    result = call("report", str(example), "--out", str(tmp_path))
    assert result.exit_code == 0, text(result)
    assert "foreign_encoder:send" in (tmp_path / "report.html").read_text(encoding="utf-8")
    result = call("compare", str(example), "--json")
    assert result.exit_code == 0, text(result)
    (row,) = json.loads(result.stdout)[0]["rows"]
    assert (row["row"], row["net"], row["wire"]) == ("send", None, 16)


def test_two_audits_of_an_encoder_agree(code: str) -> None:
    words = ("audit-encoder", f"{code}:good", "--data", "digits", "--profile", "smoke", "--json")
    first, second = (json.loads(call(*words, "--out", out).stdout) for out in ("a", "b"))
    assert list(differences(first, second)) == []
    assert record_of(Path("a")) == first
    assert first["accuracy"] is None
    assert "class-mean" in first["audit"]["left_out"]
    assert first["audit"]["aux_images"] == 1797 - 359
    page = Path("a/report.html").read_text(encoding="utf-8")
    assert "is not known. A stranger rebuilds" in page
    result = call("compare", "a", "b")
    assert result.exit_code == 0, text(result)


@pytest.mark.usefixtures("no_page")
def test_the_code_of_the_page_can_be_audited(code: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    data = save("few", 0, 60)
    names, options = ("send", "client"), (("--noise", "0.05"), ("--white-box",))
    for block, name, more in zip(blocks, names, options, strict=True):
        Path(f"{code}_{name}.py").write_text(block, encoding="utf-8")
        words = (f"{code}_{name}:{name}", "--data", data, "--profile", "smoke", *more)
        result = call("audit-encoder", *words)
        assert result.exit_code == 0, text(result)


@pytest.mark.usefixtures("no_page")
def test_a_run_as_an_encoder_has_the_same_numbers(code: str) -> None:
    del code
    data = save("few", 0, 60)
    words = ("--dataset", data, "--defence", "noise", "--epochs", "1", "--final")
    result = call("train", *words, "--device", "cpu", "--name", "mine")
    assert result.exit_code == 0, text(result)
    Path("mine_audited.py").write_text(RUN, encoding="utf-8")
    words = ("--data", data, "--server", "mine_audited:head", "--profile", "smoke", "--json")
    found = json.loads(call("audit-encoder", "mine_audited:send", *words).stdout)
    assert "rmle" not in found["attacks"]  # a function has no gradient to search with
    same = ("--profile", "smoke", "--attacks", ",".join(found["attacks"]), "--json")
    own = json.loads(call("audit", "runs/mine", *same).stdout)
    for key in ("accuracy", "attacks", "strongest", "worst_case", "ceiling", "leakage", "splits"):
        assert list(differences(own[key], found[key], key)) == []
    assert found["client"]["wire_floats"] == own["client"]["wire_floats"]


@pytest.mark.usefixtures("no_page")
def test_a_client_that_sends_only_some_images_is_audited_by_its_rule(code: str) -> None:
    words = ("audit-encoder", f"{code}:good", "--data", "digits", "--profile", "smoke", "--json")
    asks = ("--asks", f"{code}:bright")
    result = call(*words, *asks, "--server", f"{code}:answer")
    assert result.exit_code == 0, text(result)
    assert "not measured: accuracy: it needs --server and --own" in text(result)
    record = json.loads(result.stdout)
    assert 0.2 < record["sent"] < 0.8
    assert record["accuracy"] is None
    assert 0 < record["exposure"] < 1
    assert record["exposure"] >= record["sent"] * record["leakage_sent"] - 1e-9
    assert record["config"]["asks"] == f"{code}:bright"
    assert "exit tells the class" in {flag["name"] for flag in record["flags"]}
    assert record["leaks"]["exit"]["brightness"]["bits"] > 0.5
    assert "own answer" not in record["leaks"]["exit"]
    result = call(*words, *asks, "--server", f"{code}:answer", "--own", f"{code}:guess")
    assert result.exit_code == 0, text(result)
    told = json.loads(result.stdout)
    assert told["exposure"] == record["exposure"]
    assert 0 < told["accuracy"] < 0.3
    assert told["probe"]["own"]["accuracy"] == pytest.approx(0.1, abs=0.02)
    result = call(*words, "--asks", f"{code}:all_of_them")
    assert json.loads(result.stdout)["sent"] == 1


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("good", ("--own", "{code}:guess"), "say which are sent with --asks, or leave --own out"),
        ("good", ("--asks", "bright"), "--asks must be MODULE:FUNCTION, for example"),
        ("good", ("--asks", "{code}:nothing"), "sends none of the 359 scored images"),
        ("good", ("--asks", "{code}:how_sure"), "must say True or 1 for an image that is sent"),
        ("good", ("--asks", "{code}:scores"), "must return one value per image, got shape (10,)"),
        ("good", ("--asks", "{code}:rises"), "failed: given numpy arrays, ValueError: weights"),
        ("rises", (), "failed: given numpy arrays, ValueError: weights are missing (for 2"),
        ("late", (), "failed: MemoryError: too many images (for 359 inputs of shape (1, 8, 8))"),
        ("wrong_batch", (), "returned shape (3, 4) for 2 inputs; the first axis must be theirs"),
        ("changing", (), "changed its output shape: (1,) per image, before it was (2,)"),
        ("two", (), "must return one array or tensor of real numbers, got a tuple"),
        ("Encoder", (), "must be a function or another object to call with images, got a class"),
        ("number", (), "must be a function or another object to call with images, got a int"),
        ("absent", (), "cannot import 'absent' from"),
        ("quiet", ("--noise", "0.1"), "noise of standard deviation 0.1 was declared, but two"),
        ("good", ("--noise", "0"), "noise must be a finite number > 0, got 0"),
        ("good", ("--white-box",), "is a function: leave --white-box out"),
        ("good", ("--input", "nmpy"), "unknown input 'nmpy'; did you mean 'numpy'?"),
        ("good", ("--aux", "held-out"), "--aux must be train or test90 for a callable"),
        ("good", ("--test-data", "digits"), "give --data, whose training part"),
        ("good", ("--attacks", "linear"), "No such option: --attacks"),
        ("good", ("--server", "answer"), "--server must be MODULE:FUNCTION, for example"),
        ("good", ("--server", "{code}:answers_wrongly"), "in 0..9, got () per image as 10"),
        ("good", ("--server", "{code}:rises"), "failed: given numpy arrays, ValueError: weights"),
    ],
)
def test_a_bad_encoder_exits_with_2(
    code: str, function: str, options: tuple[str, ...], said: str
) -> None:
    words = [option.format(code=code) for option in options]
    result = call(
        "audit-encoder", f"{code}:{function}", "--data", "digits", "--profile", "smoke", *words
    )
    assert result.exit_code == 2, text(result)
    assert said in text(result)
    assert "Traceback" not in text(result)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("no_page")
def test_what_the_function_prints_is_kept_out_of_the_results(code: str) -> None:
    words = ("--data", save("few", 0, 60), "--profile", "smoke", "--json")
    result = call("audit-encoder", f"{code}:loud", *words)
    assert result.exit_code == 0, text(result)
    assert json.loads(result.stdout)["config"]["callable"] == f"{code}:loud"
    assert "hello" in result.stderr


def test_a_module_that_ends_the_process_on_import_is_refused(code: str) -> None:
    Path(f"{code}_script.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    result = call("audit-encoder", f"{code}_script:send", "--data", "digits")
    assert result.exit_code == 2, text(result)
    assert "ends the process when it is imported (exit 0)" in text(result)


def test_images_must_be_named(code: str) -> None:
    result = call("audit-encoder", f"{code}:good")
    assert result.exit_code == 2
    assert "give --data" in text(result)


def test_results_of_another_function_are_kept(code: str) -> None:
    words = ("--data", "digits", "--profile", "smoke")
    Path("trained").mkdir()
    Path("trained/config.toml").touch()
    result = call("audit-encoder", f"{code}:good", *words, "--out", "trained")
    assert (result.exit_code, "trained is a trained run" in text(result)) == (2, True)
    Path("runs/good").mkdir(parents=True)
    Path("runs/good/record.json").write_text('{"config": {"callable": "other:good"}}')
    result = call("audit-encoder", f"{code}:good", *words)
    assert (result.exit_code, "holds the record of 'other:good'" in text(result)) == (2, True)


@pytest.mark.parametrize("out", ["file", "file/below", "n" * 300])
def test_the_results_folder_is_tried_before_the_function(code: str, out: str) -> None:
    Path("file").touch()
    before = sorted(Path().iterdir())
    words = ("--data", "digits", "--profile", "smoke", "--out", out)
    result = call("audit-encoder", f"{code}:rises", *words)
    assert result.exit_code == 2
    assert f"cannot write {out}" in text(result)
    assert "weights are missing" not in text(result), "the function was called first"
    assert sorted(Path().iterdir()) == before


@pytest.mark.usefixtures("no_page")
def test_the_attackers_images_may_lie_apart(code: str) -> None:
    known, scored, both = save("known", 0, 40), save("scored", 40, 60), save("both", 30, 60)
    words = ("audit-encoder", f"{code}:good", "--profile", "smoke", "--json", "--aux-data", known)
    result = call(*words, "--test-data", scored)
    assert result.exit_code == 0, text(result)
    record = json.loads(result.stdout)
    assert (record["audit"]["aux_images"], record["audit"]["scored"]) == (40, 20)
    assert record["audit"]["aux"] == "aux-data"
    result = call(*words, "--test-data", both)
    assert result.exit_code == 2
    assert "10 images of --test-data are in --aux-data too" in text(result)
    result = call(*words, "--test-data", save("three", 40, 60, classes=3))
    assert result.exit_code == 2
    assert "--aux-data has classes ('0', '1'), --test-data ('0', '1', '2')" in text(result)
