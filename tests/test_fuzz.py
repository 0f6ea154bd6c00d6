"""Broken files of strangers: always an error of the package, soon, and in little memory.

Every case is made from a seed, so that a case that fails can be made again.
"""

import copy
import json
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.calling import call, text
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_gallery, make_metrics, make_record
from safetensors.torch import save
from serve.made import SHAPE, manifest, pictures

from splitveil.config.resolve import read_folder
from splitveil.errors import SplitVeilError
from splitveil.experiments.search import ended_trials, make_plan, read_plan
from splitveil.record.files import RunFiles, last_epoch, read_run
from splitveil.record.schema import parse_record, per_image_mse, read_record
from splitveil.report.columns import SUMMARY
from splitveil.serve.manifest import read_manifest
from splitveil.serve.stages import apply_stages
from splitveil.serve.transport import CAPTURE_FORMAT, CapturedCall, read_capture
from splitveil.serve.wire import (
    TensorSpec,
    decode_answer,
    decode_request,
    encode_request,
)
from splitveil.train.state import FORMAT, Checkpoint, read_checkpoint, read_meta, write_checkpoint

Z = TensorSpec(name="z", shape=SHAPE)
SECONDS = 20  # a case that takes so long hangs
MEGABYTES = 512  # by which the process may grow over all cases
FEW, MANY = 10, 1_000  # cases of each format
SITTINGS = 15  # commands on a broken run, for each file

JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2.5, -3, 10**30, 10**400, 1e300, -1e-300, "", "a", "z" * 300,
    "none", "NaN", "\x00", "\x1b[2J", "\u202e", "../../x", "é", [], {}, [[]], {"a": []}, [None],
    ["x"], [1, 2, 3], [True], {"name": 1}, [[[[[[0]]]]]], {"a": {"b": {"c": {}}}}, "splitveil-1",
    "AAAA", "=1+1",
]  # fmt: skip
TOKENS = (
    b"NaN", b"Infinity", b"1e999", b"-1", b"1" * 400, b"9" * 5000, b"[" * 70, b"[" * 3000,
    b'{"a":' * 3000, b"]" * 10, b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"\\ud800", b"null",
    b"true", b"\n", b"=", b"a.a.a", b"''", b"1979-05-27T07:32:00Z", b"0x7fffffffffffffffffff",
    b"{}", b"[]", b",", b"\r", b"\x1b]0;x\x07",
)  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A content with some of its bytes changed."""
    body = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, kind = rng.randrange(len(body) + 1), rng.randrange(6)
        upto = min(len(body), at + rng.choice([1, 2, 8, 100]))
        if kind == 0:
            body[at:upto] = rng.randbytes(upto - at)
        elif kind == 1:
            del body[at:upto]
        elif kind == 2:
            body[at:at] = rng.choice(TOKENS)
        elif kind == 3:
            body[at:upto] = rng.choice(TOKENS)
        elif kind == 4:
            body[at:at] = body[at:upto] * rng.choice([1, 3])
        else:
            del body[rng.randrange(len(body) + 1) :]
    return bytes(body)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401
    """The paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def replaced(content: bytes, rng: random.Random) -> bytes:
    """One of the lines, a JSON object, with some of its values replaced, deleted or added."""
    lines = content.split(b"\n")
    objects = [number for number, line in enumerate(lines) if line.startswith(b"{")]
    if not objects:
        return mutated(content, rng)
    chosen = rng.choice(objects)
    line = lines[chosen].decode("latin-1") if len(objects) > 1 else content.decode("latin-1")
    try:
        whole, end = json.JSONDecoder().raw_decode(line)
    except ValueError:  # a line of a binary file that only begins like an object
        return mutated(content, rng)
    for _ in range(rng.choice([1, 1, 2, 4])):
        where = rng.choice(list(places(whole)) or [("a",)])
        inner = whole
        for key in where[:-1]:
            inner = inner[key]
        kind = rng.randrange(4)
        if kind == 0 and where[-1] in (inner if isinstance(inner, dict) else range(len(inner))):
            del inner[where[-1]]
        elif kind == 1 and isinstance(inner, dict):
            inner[rng.choice(["a", "noise", "exit", ""])] = copy.deepcopy(rng.choice(JUNK))
        elif isinstance(inner, dict) or where[-1] < len(inner):
            inner[where[-1]] = copy.deepcopy(rng.choice(JUNK))
    made = json.dumps(whole).encode() + line[end:].encode("latin-1")
    return b"\n".join([*lines[:chosen], made, *lines[chosen + 1 :]]) if len(objects) > 1 else made


def broken(content: bytes, rng: random.Random) -> bytes:
    """A broken copy of a JSON object, of TOML or of binary bytes."""
    return (replaced if rng.random() < 0.6 else mutated)(content, rng)


@dataclass(frozen=True)
class Format:
    """Good contents of one kind, and a reader of any content."""

    good: tuple[bytes, ...]
    read: Callable[[bytes, Path], object]


def wire_body(binary: bool) -> bytes:
    return encode_request(pictures(2, 1), Z, "logits", binary=binary).body


def read_wire(content: bytes, _: Path) -> None:
    own_error_only(lambda: decode_answer(content, None, Z, 2))
    own_error_only(lambda: decode_request(content, "9" * 20, Z, "logits", 8))
    told = str(content.find(b"]}") + 2) if b"binary_data_size" in content else None
    decode_request(content, told, Z, "logits", 8)


def read_exported(content: bytes, folder: Path) -> None:
    (folder / "manifest.json").write_bytes(content)
    found = read_manifest(folder)
    assert found.to_json()
    assert found.identity
    assert found.noise_std >= 0


def read_audited(content: bytes, folder: Path) -> None:
    (folder / "record.json").write_bytes(content)
    found = read_record(folder / "record.json")
    per_image_mse(found)
    assert parse_record(found.to_json()).to_dict() == found.to_dict()


def read_pictures(content: bytes, folder: Path) -> None:
    (folder / "gallery.json").write_bytes(content)
    read_run(folder, audited=False)


def read_log(content: bytes, folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(content)
    last_epoch(folder)


def read_state(content: bytes, folder: Path) -> None:
    file = folder / "checkpoint.safetensors"
    file.write_bytes(content)
    own_error_only(lambda: read_meta(file)["step"] + len(read_meta(file)["passport"]))
    assert read_checkpoint(file).part("model") is not None


def read_meta_of(content: bytes, folder: Path) -> None:
    state = {"format": FORMAT, "state": content.decode("utf-8", "replace")}
    (folder / "checkpoint.safetensors").write_bytes(save({}, state))
    found = read_meta(folder / "checkpoint.safetensors")
    assert found["step"] >= 0
    assert isinstance(found["passport"], dict)


def read_settings(content: bytes, folder: Path) -> None:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "config.toml").write_bytes(content)
    config, built = read_folder(folder / "run")
    assert config.folder == folder / "run"
    assert len(built.image_shape) == 3


def read_sent(content: bytes, folder: Path) -> None:
    (folder / "sent.jsonl").write_bytes(content)
    list(read_capture(folder / "sent.jsonl"))


def read_sweep(content: bytes, folder: Path) -> None:
    (folder / "sweep.json").write_bytes(content)
    read_plan(folder)


def read_journal(content: bytes, folder: Path) -> None:
    """As the file of one trial, which is run again if it is broken, and as a journal of 0.1.0."""
    plan = make_plan({"defences": ("none", "noise"), "vary": ("noise_std=0.1,0.2",)}, {})
    trial = folder / "trials" / "there" / "trial.json"
    trial.parent.mkdir(parents=True, exist_ok=True)
    trial.write_bytes(content)
    own_error_only(lambda: [t.error or t.point for t in ended_trials(plan, folder).values()])
    trial.unlink()
    journal = folder / "journal.jsonl"
    journal.write_bytes(content)
    try:
        assert all(t.error or t.point for t in ended_trials(plan, folder).values())
    finally:
        journal.unlink()


META = {
    "step": 3, "seconds": 1.5, "warned": 0, "collapsed": False, "log_offset": 100, "threads": 1,
    "meter_counts": {"loss": 2}, "optimisers": [{"scalars": {}, "param_groups": []}],
    "peak_bytes": None, "passport": {"versions": {"torch": "1"}, "splits": {"train": "0"}},
}  # fmt: skip


def checkpoints(folder: Path) -> tuple[bytes, ...]:
    """A checkpoint with and one without tensors."""
    for name, tensors in (("a", {"model.w": torch.ones(2, 2)}), ("b", {})):
        write_checkpoint(folder / name, Checkpoint(tensors, META))
    return tuple((folder / name).read_bytes() for name in "ab")


CONFIG = b"""dataset = "digits"
defence = "veil"
seed = 0
name = "run"
epochs = 3
device = "cpu"
runs_dir = "runs"
net = "auto"
batch_size = 128
lr = 0.1
noise_std = 0.05
teacher = "none"
lambd = 0.3
image_shape = [1, 8, 8]
num_classes = 10
data_hash = "0123456789abcdef"
"""
TRIAL = {
    "defence": "noise", "number": 0, "label": "noise/0", "settings": {"noise_std": 0.1}, "seed": 0,
    "seconds": 1.5, "run": "there", "error": None, "key": "k",
    "found": {"accuracy": 0.5, "leakage": 0.25, "mse": 0.01, "attack": "linear", "ceiling": 0.05},
}  # fmt: skip


def formats(folder: Path) -> dict[str, Format]:
    """Every format, with good contents."""
    plan = make_plan({"defences": ("none", "noise"), "vary": ("noise_std=0.1,0.2",)}, {})
    first = json.dumps({"format": CAPTURE_FORMAT})
    sent = CapturedCall("/v2/models/m/infer", wire_body(binary=False)).to_line()
    stages = ({"kind": "quantise", "bits": 4}, {"kind": "clip", "low": 0.0, "high": 1.0},
              {"kind": "dropout", "p": 0.1}, {"kind": "gaussian", "std": 0.1})  # fmt: skip
    exported = [manifest(), type(manifest())(**{**vars(manifest()), "stages": stages})]
    return {
        "wire": Format((wire_body(binary=True), wire_body(binary=False)), read_wire),
        "manifest": Format(tuple(m.to_json().encode() for m in exported), read_exported),
        "record": Format((json.dumps(make_record("veil")).encode(),), read_audited),
        "gallery": Format((json.dumps(make_gallery("veil")).encode(),), read_pictures),
        "metrics": Format((make_metrics("veil").encode(),), read_log),
        "checkpoint": Format(checkpoints(folder), read_state),
        "state": Format((json.dumps(META).encode(),), read_meta_of),
        "config": Format((CONFIG,), read_settings),
        "capture": Format((f"{first}\n{sent}\n".encode(),), read_sent),
        "plan": Format((json.dumps(asdict(plan)).encode(),), read_sweep),
        "journal": Format((json.dumps(TRIAL).encode() + b"\n",), read_journal),
    }


NAMES = (
    "wire", "manifest", "record", "gallery", "metrics", "checkpoint", "state", "config", "capture",
    "plan", "journal",
)  # fmt: skip


def own_error_only(read: Callable[[], object]) -> bool:
    """Whether a reader refused; any error but the package's own is raised."""
    try:
        read()
    except SplitVeilError:
        return True
    return False


@contextmanager
def soon() -> Iterator[None]:
    """Fail if the block hangs."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_file_is_an_error_of_the_package(name: str, count: int, tmp_path: Path) -> None:
    kind = formats(tmp_path)[name]
    for good in kind.good:
        assert not own_error_only(partial(kind.read, good, tmp_path)), "a good one is refused"
    before, refused = peak_megabytes(), 0
    for case in range(count):
        rng = random.Random(f"{name}/{case}")  # noqa: S311
        content = broken(rng.choice(kind.good), rng)
        try:
            with soon():
                refused += own_error_only(partial(kind.read, content, tmp_path))
        except BaseException as err:
            err.add_note(f"case {case} of {name}: {content[:2000]!r}")
            raise
    assert peak_megabytes() - before < MEGABYTES
    assert refused > count // 20, "the cases are too tame"


NUMBERS = st.floats(allow_nan=False) | st.integers(-3, 70) | st.sampled_from([10**30, True, None])
FIELDS = {
    "gaussian": ["std"], "dropout": ["p"], "topk": ["prune"], "quantise": ["bits"],
    "clip": ["low", "high"],
}  # fmt: skip
STAGE = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda kind: st.fixed_dictionaries(
        {"kind": st.just(kind)} | dict.fromkeys(FIELDS[kind], NUMBERS)
    )
)


@given(st.lists(STAGE, max_size=3))
def test_stages_that_a_manifest_may_name_send_finite_numbers(stages: list[dict[str, Any]]) -> None:
    made = vars(manifest()) | {"stages": tuple(stages)}
    if own_error_only(lambda: type(manifest())(**made)):
        return
    sent = apply_stages(pictures(2), stages)
    assert np.isfinite(sent).all()
    assert sent.dtype == np.float32


ODD = st.floats() | st.integers() | st.sampled_from(JUNK) | st.text(max_size=5)


@given(st.data())
def test_a_record_with_odd_values_is_refused_or_shown(data: st.DataObject) -> None:
    whole = make_record("veil")
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(list(places(whole))))
        inner: Any = whole
        for key in path:
            inner = inner[key]
        inner[last] = data.draw(ODD)
    try:
        record = parse_record(json.dumps(whole))
    except (SplitVeilError, ValueError):
        return
    run = RunFiles(name="run", path=Path("run"), record=record)
    for style in ("terminal", "html", "csv"):
        assert SUMMARY.render([run], style)


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("audit",), ("doctor",), ("explain",), ("compare",), ("report",), ("export", "--overwrite"),
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small audited run whose data are gone, so that no command computes for long."""
    folder = tmp_path_factory.mktemp("fuzz")
    done = call("train", "--epochs", "1", "--runs-dir", folder, "--name", "run", "--device", "cpu")
    assert done.exit_code == 0, text(done)
    run = folder / "run"
    config = (run / "config.toml").read_text(encoding="utf-8")
    (run / "config.toml").write_text(config.replace('"digits"', '"npz:absent.npz"'), "utf-8")
    for name, made in (("record", make_record("veil")), ("gallery", make_gallery("veil"))):
        (run / f"{name}.json").write_text(json.dumps(made), "utf-8")
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["config.toml", "metrics.jsonl", "record.json", "gallery.json", "checkpoint.safetensors"],
)
def test_commands_that_read_a_broken_run_say_why_and_end_with_two(trained: Path, file: str) -> None:
    good = (trained / file).read_bytes()
    codes: Counter[int] = Counter()
    try:
        for case in range(SITTINGS):
            rng = random.Random(f"{file}/{case}")  # noqa: S311
            content = broken(good, rng)
            (trained / file).write_bytes(content)
            words = rng.choice(COMMANDS)
            with soon():
                result = call(words[0], trained, *words[1:])
            codes[result.exit_code] += 1
            told = (case, words, text(result)[-400:], result.exception, content[:1500])
            assert result.exit_code in (0, 2), told
            assert result.exit_code == 0 or "error:" in result.stderr, told
            assert "Traceback" not in text(result), told
    finally:
        (trained / file).write_bytes(good)
    assert codes[2] > 0
