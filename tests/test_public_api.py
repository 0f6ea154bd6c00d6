"""The public face: names, arguments and defaults that others call, and what importing costs."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitveil as sv
from splitveil.config.resolve import DataFacts
from splitveil.surrogates.base import SurrogateOutput

NAMES = {
    "Record", "Run", "RunConfig", "Victim", "__version__", "attacks", "audit", "data", "defences",
    "errors", "fit", "load_run", "nets", "records", "report", "serve", "surrogates", "train",
}  # fmt: skip

REQUIRED = inspect.Parameter.empty


def arguments(call: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults, without `self`."""
    parameters = inspect.signature(call).parameters
    return {name: p.default for name, p in parameters.items() if name != "self"}


def keyword_only(call: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(call).parameters
    return {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def test_the_list_of_public_names() -> None:
    assert set(sv.__all__) == NAMES
    assert set(dir(sv)) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_can_be_imported(name: str) -> None:
    found = getattr(sv, name)
    assert getattr(found, "__name__", name).rpartition(".")[2] == name or isinstance(found, str)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'splitveil' has no attribute 'fitt'"):
        _ = sv.fitt
    assert not hasattr(sv, "runs_")


def test_gated_attention_pooling() -> None:
    kind = sv.surrogates.GatedAttentionPooling
    assert arguments(kind) == {"feature_dim": REQUIRED, "hidden_dim": None, "bias": True}
    pooling = kind(8, 3)
    shapes = [tuple(m.weight.shape) for m in (pooling.value, pooling.gate, pooling.score)]
    assert shapes == [(3, 8), (3, 8), (1, 3)]
    assert all(isinstance(m, nn.Linear) for m in (pooling.value, pooling.gate, pooling.score))


def test_gated_attention_cem() -> None:
    kind = sv.surrogates.GatedAttentionCEM
    assert arguments(kind) == {
        "feature_dim": REQUIRED,
        "num_classes": REQUIRED,
        "form": "gated",
        "attention": "minimise",
        "statistic": None,
        "penalty": None,
        "noise_std": None,
        "hidden_dim": None,
        "bias": True,
        "attention_norm": True,
        "var_threshold": 0.125,
        "reg_strength": 0.025,
        "gamma": 0.0,
        "eps": 1e-6,
        "class_gate_a": 10.0,
        "class_gate_b": 0.05,
        "snr_thresh": 0.3,
        "snr_sharp": 10.0,
        "softplus_beta": 1.0,
        "margin_m": 0.1,
        "slot_power": 2.0,
        "bank": 0,
    }
    assert keyword_only(kind) == arguments(kind).keys() - {"feature_dim", "num_classes"}
    assert isinstance(kind(8, 2).pooling, sv.surrogates.GatedAttentionPooling)


def test_rate() -> None:
    kind = sv.surrogates.Rate
    assert arguments(kind) == {
        "feature_dim": REQUIRED,
        "num_classes": REQUIRED,
        "noise_std": REQUIRED,
        "covariance": "diagonal",
        "bank": 0,
    }
    assert keyword_only(kind) == {"noise_std", "covariance", "bank"}


@pytest.mark.parametrize("shape", [(12, 8), (12, 2, 2, 2)])
def test_a_surrogates_answer(shape: tuple[int, ...]) -> None:
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.arange(12) % 3
    surrogates = [sv.surrogates.GatedAttentionCEM(8, 3), sv.surrogates.Rate(8, 3, noise_std=0.1)]
    for surrogate in surrogates:
        out = surrogate(z, y)
        assert isinstance(out, SurrogateOutput)
        assert out.loss.shape == out.intra_mse.shape == ()
        assert out.loss.requires_grad
        assert {"effective_sample_size", "true_rate"} <= out.diagnostics.keys()
        detached: list[Tensor] = [out.intra_mse, *out.diagnostics.values()]
        assert not any(t.requires_grad for t in detached)


def test_scale_gradient() -> None:
    call = sv.train.scale_gradient
    assert list(arguments(call))[:2] == ["x", "factor"]
    z = torch.ones(3, requires_grad=True)
    scaled = call(z, 4.0)
    assert torch.equal(scaled, z)
    scaled.sum().backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert z.grad.tolist() == [4.0] * 3


def test_cut_and_the_model_it_gives() -> None:
    assert list(arguments(sv.nets.cut))[:2] == ["backbone", "at"]
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    model = sv.nets.cut(backbone, at=2)
    assert isinstance(model, sv.nets.SplitModel)
    assert [type(m) for m in model.encoder.children()] == [nn.Conv2d, nn.Flatten]
    assert [type(m) for m in model.head.children()] == [nn.Linear]
    assert isinstance(model.channel, sv.nets.Channel)
    assert model.macs(input_shape=(1, 4, 4)) == 2 * 2 * 2 * 9
    assert model.wire_floats(input_shape=(1, 4, 4)) == 8


def test_run_config() -> None:
    config = sv.RunConfig(dataset="digits", defence="veil", seed=0, name="x")
    assert (config.dataset, config.defence, config.seed, config.name) == ("digits", "veil", 0, "x")
    assert keyword_only(sv.RunConfig) == arguments(sv.RunConfig).keys()
    assert config.folder == Path("runs/x")
    with pytest.raises(AttributeError):
        config.seed = 1  # type: ignore[misc]


def test_fit_load_run_and_audit() -> None:
    assert next(iter(arguments(sv.fit))) == "config"
    assert keyword_only(sv.fit) == {"resume", "overwrite", "progress"}
    assert arguments(sv.fit)["resume"] is arguments(sv.fit)["overwrite"] is False
    assert arguments(sv.load_run) == {"path": REQUIRED}
    assert list(arguments(sv.audit))[:2] == ["run", "profile"]
    assert arguments(sv.audit)["profile"] == "quick"


def test_a_run_has_path_model_victim_and_record(tmp_path: Path) -> None:
    model = sv.nets.cut(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), at=1)
    run = sv.Run(tmp_path, sv.RunConfig(), DataFacts((1, 2, 2), 3, "0"), model)
    assert run.path == tmp_path
    assert run.model is model
    x = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    sent = run.victim.send(x, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sent, x.flatten(1))
    assert run.record is None


RECORD: dict[str, Any] = {
    "accuracy": 0.5, "attacks": {}, "strongest": {}, "worst_case": {}, "ceiling": {}, "floor": {},
    "leakage": 0.0, "true_rate_nats": None, "client": {}, "config": {}, "splits": {}, "seeds": {},
    "versions": {}, "device": "cpu", "seconds": {}, "audit": {}, "training": {},
    "strongest_blackbox": {}, "flags": [],
    "per_image": {}, "certificates": {}, "leaks": {},
}  # fmt: skip


def test_the_record_is_the_one_on_disk(tmp_path: Path) -> None:
    model = sv.nets.cut(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), at=1)
    run = sv.Run(tmp_path, sv.RunConfig(), DataFacts((1, 2, 2), 3, "0"), model)
    (tmp_path / "record.json").write_text(json.dumps(RECORD), encoding="utf-8")
    record = run.record
    assert isinstance(record, sv.Record)
    assert record.to_dict() == RECORD
    (tmp_path / "record.json").write_text('{"accuracy": ', encoding="utf-8")
    with pytest.raises(sv.errors.RunError, match="`splitveil audit` writes records"):
        _ = run.record


def test_every_error_a_user_can_cause_has_one_parent() -> None:
    named = [v for v in vars(sv.errors).values() if isinstance(v, type)]
    every = [k for k in named if issubclass(k, BaseException)]
    kinds = [k for k in every if k.__module__ == "splitveil.errors"]
    assert {k.__name__ for k in kinds} >= {"ConfigError", "DataError", "RunError", "AuditError"}
    assert all(issubclass(k, sv.errors.SplitVeilError) for k in kinds)


HEAVY = ("torch", "lightning_fabric", "torchmetrics", "sklearn", "matplotlib")


def loaded_by(code: str) -> set[str]:
    """Heavy libraries that a fresh process has imported after running `code`."""
    report = f"print('loaded:', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_the_measure_of_imports_sees_an_import() -> None:
    assert loaded_by("import matplotlib") == {"matplotlib"}


def test_importing_splitveil_loads_no_heavy_library() -> None:
    assert loaded_by("import splitveil\ndir(splitveil)\nsplitveil.__version__") == set()


def test_help_loads_no_heavy_library() -> None:
    code = """
from splitveil.cli import main
for words in (["--help"], ["--version"], ["train", "--help"]):
    sys.argv = ["splitveil", *words]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, (words, stop.code)
"""
    assert loaded_by(code) == set()
