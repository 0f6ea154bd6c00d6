"""Bad input on the command line: a message that says what to do, exit code 2, nothing written."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.calling import call, text


def npz(path: Path, **arrays: Any) -> str:  # noqa: ANN401
    np.savez(path, **arrays)
    return f"npz:{path}"


def bad_inputs(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Name → command line, words of the message."""
    x, y = np.random.default_rng(0).random((40, 8, 8, 1)), np.arange(40) % 4
    hole = x.copy()
    hole[3, 0, 0] = np.nan
    (folder / "cifar-10-binary.tar.gz").write_bytes(b"\x1f\x8bnot an archive")
    (folder / "file").write_text("")
    labels = {"x": x, "y": y + 1, "classes": np.array(["a", "b", "c", "d"])}
    train = ["train", "--epochs", "1", "--runs-dir", str(folder / "runs")]
    return {
        "unknown dataset": ([*train, "--dataset", "digit"], "did you mean 'digits'"),
        "unknown defence": ([*train, "--defence", "gated"], "did you mean 'gated-att'"),
        "unknown setting": ([*train, "--set", "lamdb=1"], "did you mean 'lambd'"),
        "a setting as an option": ([*train, "--lambd", "0.3"], "write --set lambd=… for this"),
        "a setting by another name": ([*train, "--lambda=0.3"], "write --set lambd=… for this"),
        "corrupt archive": (
            [*train, "--dataset", "cifar10", "--data-dir", str(folder)],
            "cifar-10-binary.tar.gz",
        ),
        "labels out of range": ([*train, "--dataset", npz(folder / "l.npz", **labels)], "0..3"),
        "NaN images": ([*train, "--dataset", npz(folder / "n.npz", x=hole, y=y)], "NaN"),
        "images outside [0,1]": (
            [*train, "--dataset", npz(folder / "o.npz", x=255 * x, y=y)],
            "divide by 255",
        ),
        "missing path": ([*train, "--dataset", "npz:absent.npz"], "absent.npz"),
        "negative lambda": ([*train, "--set", "lambd=-1"], "lambd must be a finite number ≥ 0"),
        "rate without noise": ([*train, "--set", "noise_std=0"], "needs channel noise"),
        "batches of nothing": ([*train, "--set", "batch_size=0"], "batch_size must be at least 2"),
        "a negative attack seed": (["audit", str(folder), "--seed", "-1"], "--seed"),
        "compiled on a CPU": (
            [*train, "--device", "cpu", "--set", "compile=true"],
            "compile=true needs a GPU",
        ),
        "noise without a noisy defence": (
            [*train, "--defence", "none", "--set", "noise_std=0.1"],
            "adds no noise",
        ),
        "unwritable folder": (
            ["train", "--epochs", "1", "--runs-dir", str(folder / "file" / "runs")],
            "cannot write",
        ),
        "a name longer than disks take": (
            [*train, "--name", "n" * 300],
            "name must start with a letter or digit",
        ),
        "a folder longer than disks take": (
            ["train", "--epochs", "1", "--runs-dir", "n" * 300],
            "Choose a shorter name",
        ),
        "data in a folder longer than disks take": (
            [*train, "--dataset", "cifar10", "--data-dir", "n" * 300],
            "File name too long; check the path",
        ),
        "a path that is not UTF-8": (
            [*train, "--dataset", f"npz:{folder}/\udcff.npz"],
            "dataset must be valid UTF-8 for config.toml",
        ),
        "more than memory": ([*train, "--set", "hidden_dim=1000000000000"], "not enough memory"),
        "more than can be counted": ([*train, "--set", f"bank={10**30}"], "choose smaller sizes"),
        "a command that moved": (["bench"], "benchmarks/surrogate_speed.py"),
        "too many classes": (
            [
                "clients",
                *["--macs", "1e6", "--wire", "64", "--backbone", "vgg11", "--classes"],
                str(10**18),
            ],
            "not enough memory",
        ),
        "a share outside 0…1": (
            [*train, "--defence", "early-exit", "--set", "send=1.5"],
            "send must be in [0, 1], got 1.5",
        ),
        "a target accuracy of all": (
            [*train, "--defence", "early-exit", "--set", "target_accuracy=1"],
            "target_accuracy must be in [0, 1), got 1.0",
        ),
        "an exit rule without an own head": (
            [*train, "--defence", "noise", "--set", "send=0.3"],
            "'send' is a setting of early-exit; train with --defence early-exit",
        ),
        "early exit on all images": (
            [*train, "--defence", "early-exit", "--final"],
            "sets its threshold on validation images, but --final trains on them",
        ),
        "thresholds per class of few images": (
            [*train, "--defence", "early-exit", "--set", "per_class=true"],
            "at least 50 validation images per class, 500 in all, got 144; leave per_class out",
        ),
        "a server that does not fit": (
            [*train, "--client", "strided-8-8x2.16-c4", "--server", "vgg11"],
            "server 'vgg11' does not fit the wire",
        ),
        "not a run": (["audit", str(folder)], "is not a run"),
        "unaudited report": (["report", str(folder)], "splitveil audit"),
        "nothing to resume": ([*train, "--resume", "--name", "no"], "is not a run"),
        "no GPU": ([*train, "--device", "tpu"], "device must be one of auto, cpu, cuda"),
    }


def test_bad_input_exits_with_two_and_says_what_to_do(tmp_path: Path) -> None:
    for name, (words, message) in bad_inputs(tmp_path).items():
        result = call(*words)
        assert result.exit_code == 2, f"{name}: {text(result)}"
        assert message in text(result), f"{name}: {text(result)}"
        assert "Traceback" not in text(result), name
    assert not (tmp_path / "runs").exists(), "a refused run must leave nothing behind"


@pytest.mark.parametrize("error", [RuntimeError("ours"), TypeError("ours"), OSError("ours")])
def test_a_fault_of_the_program_is_not_explained_away(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("splitveil.insight.explanation.explain_run", fails)
    assert call("explain", "run").exception is error
    monkeypatch.setattr("splitveil.insight.explanation.explain_run", lambda *_: [0] * sys.maxsize)
    assert "not enough memory (MemoryError)" in text(call("explain", "run"))
