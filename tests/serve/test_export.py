"""Export: the ONNX halves are the torch halves, and the folder is complete or absent."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from serve.conftest import Exported
from torch import Tensor, nn

from splitveil.errors import ExportError, RunError
from splitveil.nets.channel import Channel, GaussianNoise, Quantise, TopK
from splitveil.nets.split import SplitModel
from splitveil.provenance import model_hash
from splitveil.serve import export
from splitveil.serve.client import Client
from splitveil.serve.export import (
    audit_summary,
    check_target,
    export_model,
    measure_parity,
    new_folder,
    write_attacker,
)
from splitveil.serve.manifest import (
    ATTACKER,
    CLIENT,
    CLIENT_INT8,
    FILE,
    SERVER,
    OnnxHalf,
    load_half,
    open_half,
    read_manifest,
    sha256,
)
from splitveil.serve.runtime import onnxruntime
from splitveil.serve.server import load_app, running


def halves(exported: Exported) -> tuple[OnnxHalf, OnnxHalf, OnnxHalf]:
    client, int8, server = (
        load_half(exported.folder, exported.manifest, f, 1) for f in (CLIENT, CLIENT_INT8, SERVER)
    )
    return client, int8, server


def logits_of(model: SplitModel, z: NDArray[np.float32]) -> NDArray[np.float32]:
    with torch.no_grad():
        found: NDArray[np.float32] = model.head(torch.from_numpy(z)).numpy()
    return found


@pytest.mark.parametrize("n", [1, 2, 7, 300])
def test_both_halves_are_torchs_for_any_number_of_images(exported: Exported, n: int) -> None:
    client, _, server = halves(exported)
    x = exported.images[-n:]
    with torch.no_grad():
        z = exported.model.encoder(torch.from_numpy(x)).numpy()
    assert np.abs(client(x) - z).max() <= 1e-5
    assert np.abs(server(client(x)) - logits_of(exported.model, z)).max() <= 1e-4


def test_no_file_draws_anything(exported: Exported) -> None:
    for file in (CLIENT, SERVER, CLIENT_INT8):
        kinds = {node.op_type for node in onnx.load(exported.folder / file).graph.node}
        assert not {k for k in kinds if "Random" in k or k in ("Bernoulli", "Dropout")}
    client, _, _ = halves(exported)
    x = exported.images[:3]
    assert np.array_equal(client(x), client(x))


def test_the_halves_in_service_answer_as_torch_does(exported: Exported) -> None:
    x = exported.images[1400:]
    with (
        running(load_app(exported.folder, threads=1)) as url,
        Client(exported.folder, url, threads=1) as client,
    ):
        answered, sent = client.infer(x), client.send(x)
    assert np.abs(answered - logits_of(exported.model, sent)).max() <= 1e-4
    assert (answered.argmax(1) == exported.labels[1400:]).mean() > 0.85


def test_the_manifest_tells_what_was_exported(exported: Exported) -> None:
    found = read_manifest(exported.folder)
    assert found == exported.manifest
    assert (found.name, found.image_shape, found.wire_shape) == ("digits", (1, 8, 8), (8, 4, 4))
    assert found.stages == ({"kind": "gaussian", "std": 0.05},)
    assert found.num_classes == 10
    assert found.audit == {
        "leakage": 0.25, "audit": {"model": model_hash(exported.model)}, "noise_std": 0.05
    }  # fmt: skip
    assert found.parity["logits_max_abs_diff"] <= 1e-4
    assert found.versions["torch"] == torch.__version__
    files = {p for p in exported.folder.rglob("*") if p.is_file() and p.name != FILE}
    assert {p.relative_to(exported.folder).as_posix() for p in files} == found.files.keys()
    assert all(sha256((exported.folder / f).read_bytes()) == h for f, h in found.files.items())
    assert {p.name for p in exported.folder.parent.iterdir()} == {"digits"}  # nothing left beside


def test_the_int8_client_costs_less_than_a_fifth_of_a_point(exported: Exported) -> None:
    client, int8, server = halves(exported)
    z, rough = client(exported.images), int8(exported.images)
    accuracy, quantised = (
        float((server(v).argmax(1) == exported.labels).mean()) for v in (z, rough)
    )
    assert accuracy > 0.95
    assert abs(accuracy - quantised) <= 0.002
    assert 0 < np.abs(z - rough).max() < 0.1
    sizes = [(exported.folder / f).stat().st_size for f in (CLIENT_INT8, CLIENT)]
    assert sizes[0] < sizes[1]


def test_the_int8_client_goes_through_the_same_channel(exported: Exported) -> None:
    x = exported.images[:400]
    _, int8, _ = halves(exported)
    drawn = Client(exported.folder, "http://localhost:1", int8=True).send(x) - int8(x)
    assert drawn.std() == pytest.approx(0.05, rel=0.03)


def test_the_model_repository_is_the_one_triton_reads(exported: Exported) -> None:
    place = exported.folder / "repository" / "digits"
    text = (place / "config.pbtxt").read_text()
    assert text == (
        'name: "digits"\n'
        'platform: "onnxruntime_onnx"\n'
        "max_batch_size: 64\n"
        'input [ { name: "z" data_type: TYPE_INT16 dims: [ 8, 4, 4 ] } ]\n'
        'output [ { name: "logits" data_type: TYPE_FP32 dims: [ 10 ] } ]\n'
        "dynamic_batching { max_queue_delay_microseconds: 2000 }\n"
    )
    graph = onnx.load(place / "1" / "model.onnx").graph
    assert [(t.name, t.type.tensor_type.elem_type) for t in (*graph.input, *graph.output)] == [
        ("z", onnx.TensorProto.INT16),
        ("logits", onnx.TensorProto.FLOAT),
    ]
    steps = np.random.default_rng(0).integers(-200, 400, (5, 8, 4, 4)).astype(np.int16)
    session = onnxruntime().InferenceSession((place / "1" / "model.onnx").read_bytes())
    (answered,) = session.run(None, {"z": steps})
    rows = exported.manifest.wire.from_sent(steps)
    assert np.abs(answered - halves(exported)[2](rows)).max() <= 1e-5


@pytest.mark.usefixtures("without_exporter")
def test_features_are_sent_in_as_few_bits_as_their_grid_needs(tmp_path: Path) -> None:
    def exported_as(place: str, *stages: nn.Module, bounded: bool = True) -> tuple[str, object]:
        last: nn.Module = nn.Sigmoid() if bounded else nn.ReLU()
        model = SplitModel(nn.Sequential(nn.Flatten(), last), Channel(stages), nn.Linear(4, 2))
        made = export_model(model, (1, 2, 2), tmp_path / place, name="a")
        return made.datatype, made.grid

    assert exported_as("a", GaussianNoise(0.5)) == ("INT16", 0.03125)
    assert exported_as("b", GaussianNoise(0.0005), TopK(0.5))[0] == "INT32"
    assert exported_as("c", GaussianNoise(0.5), bounded=False) == ("INT32", 0.03125)
    assert exported_as("d", GaussianNoise(0.5), Quantise(4)) == ("FP32", None)
    assert exported_as("e") == ("FP32", None)
    with pytest.raises(ExportError, match=r"noise is too small: z goes up to .* steps"):
        exported_as("f", GaussianNoise(1e-6))


def quick(module: nn.Module, example: Tensor, path: Path, given: str, got: str) -> None:
    """Stands for the exporter, which takes seconds."""
    del module, example, given, got
    path.write_bytes(b"onnx")


@pytest.fixture
def without_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(*_: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"logits_max_abs_diff": 0.0}

    monkeypatch.setattr(export, "write_onnx", quick)
    monkeypatch.setattr(export, "measure_parity", same)


def tiny_model() -> SplitModel:
    return SplitModel(nn.Flatten(), Channel([GaussianNoise(0.1)]), nn.Linear(4, 3))


@pytest.mark.usefixtures("without_exporter")
def test_only_an_export_is_overwritten_and_only_if_asked(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "e"
    export_model(tiny_model(), (1, 2, 2), target, name="a")
    with pytest.raises(ExportError, match=r"exists already; .* --overwrite"):
        export_model(tiny_model(), (1, 2, 2), target, name="b")
    assert read_manifest(target).name == "a"
    (target / "stale").write_text("old")
    export_model(tiny_model(), (1, 2, 2), target, name="b", overwrite=True)
    assert read_manifest(target).name == "b"
    assert not (target / "stale").exists()
    assert [p.name for p in target.parent.iterdir()] == ["e"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(ExportError, match=r"is not an export .* is not overwritten"):
        check_target(tmp_path / "mine", overwrite=True)


@pytest.mark.usefixtures("without_exporter")
def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    version, link = tmp_path / "v1", tmp_path / "current"
    export_model(tiny_model(), (1, 2, 2), version, name="a")
    link.symlink_to(version)
    export_model(tiny_model(), (1, 2, 2), link, name="b", overwrite=True)
    assert link.is_symlink()
    assert read_manifest(version).name == "b"


def test_the_verdict_names_no_folder_of_the_auditor() -> None:
    told = audit_summary({"audit": {"profile": "quick", "command": "splitveil audit /home/anna/r"}})
    assert told["audit"] == {"profile": "quick"}


def test_a_failure_leaves_the_old_export_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "e"
    target.mkdir()
    (target / FILE).write_text("old")
    begun = new_folder(target, overwrite=True)
    with pytest.raises(RuntimeError, match="power cut"), begun as place:  # noqa: PT012
        (place / FILE).write_text("half")
        raise RuntimeError("power cut")
    assert (target / FILE).read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def killed_export(target: Path) -> None:
    """A process that fills the folder and is killed before it is done."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom splitveil.serve.export import new_folder\n"
        "with new_folder(Path(sys.argv[1]), overwrite=True) as place:\n"
        "    (place / 'half').write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_the_next_export_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    target = tmp_path / "e"
    killed_export(target)
    assert not target.exists()
    with new_folder(target, overwrite=False) as place:
        (place / FILE).write_text("whole")
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    assert [p.name for p in target.iterdir()] == [FILE]


def test_an_export_killed_between_its_two_renames_is_put_back(tmp_path: Path) -> None:
    old = tmp_path / ".e.new" / "old"
    old.mkdir(parents=True)
    (old / FILE).write_text("old")
    with (
        pytest.raises(ExportError, match=r"exists already; .* --overwrite"),
        new_folder(tmp_path / "e", overwrite=False),
    ):
        pass
    assert (tmp_path / "e" / FILE).read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_two_exports_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    with (
        new_folder(tmp_path / "e", overwrite=True),
        pytest.raises(RunError, match=r"another process exports to .*; wait until it ends"),
        new_folder(tmp_path / "e", overwrite=True),
    ):
        pass


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (OSError(28, "No space left on device"), ExportError),
        (KeyboardInterrupt("SIGTERM"), KeyboardInterrupt),
    ],
)
def test_a_full_disk_or_a_signal_puts_the_old_export_back(
    raised: BaseException,
    told: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "e"
    target.mkdir()
    (target / FILE).write_text("old")
    true = os.rename

    def rename(a: Path, b: Path) -> None:
        if a.name == "new":
            raise raised
        true(a, b)

    monkeypatch.setattr(os, "rename", rename)
    with (
        pytest.raises(told, match=r"No space left on device|SIGTERM"),
        new_folder(target, overwrite=True),
    ):
        pass
    assert (target / FILE).read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_halves_that_disagree_with_torch_are_refused(exported: Exported) -> None:
    x = exported.images[:4]
    logits = logits_of(exported.model, halves(exported)[0](x))
    z = halves(exported)[0](x)
    told = measure_parity(exported.folder, x, {"z": z, "logits": logits})
    assert told["logits_max_abs_diff"] <= 1e-4
    for wrong in (logits + np.float32(2e-4), np.full_like(logits, np.nan)):
        with pytest.raises(ExportError, match="ONNX and torch disagree"):
            measure_parity(exported.folder, x, {"z": z, "logits": wrong})


@pytest.mark.usefixtures("without_exporter")
def test_the_callers_model_is_left_as_it_is(tmp_path: Path) -> None:
    model = tiny_model().train()
    export_model(model, (1, 2, 2), tmp_path / "e", name="a")
    assert model.training
    assert model.head.training
    with pytest.raises(ExportError, match=r"the head must return .n, classes., got .16, 4, 1"):
        export_model(
            SplitModel(nn.Flatten(), Channel(), nn.Unflatten(1, (4, 1))),
            (1, 2, 2), tmp_path / "f", name="a",
        )  # fmt: skip
    assert not (tmp_path / "f").exists()


@pytest.mark.usefixtures("without_exporter")
def test_a_verdict_about_another_model_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    audited, other = tiny_model(), tiny_model()
    for model in (model_hash(other), None):
        found = audit_summary({"leakage": 0.1, "audit": {"model": model}})
        with pytest.raises(
            ExportError, match=rf"about model {model}, but .* {model_hash(audited)}"
        ):
            export_model(audited, (1, 2, 2), tmp_path / "e", name="a", audit=found)
        assert not list(tmp_path.iterdir())
    found = audit_summary({"leakage": 0.1, "audit": {"model": model_hash(audited)}})
    made = export_model(audited, (1, 2, 2), tmp_path / "e", name="a", audit=found)
    assert made.audit == found | {"noise_std": 0.1}


def texts(part: Any) -> Iterator[str]:  # noqa: ANN401 - protobuf has no types
    """Every text in an ONNX file, but not the numbers of its tensors."""
    for field, value in part.ListFields():
        for one in (
            value if isinstance(value, Sequence) and not isinstance(value, bytes) else [value]
        ):
            if hasattr(one, "ListFields"):
                yield from texts(one)
            elif field.name != "raw_data" and isinstance(one, str | bytes):
                yield one if isinstance(one, str) else one.decode()


def test_no_file_holds_a_path_a_stack_trace_or_a_name_of_its_maker(exported: Exported) -> None:
    for path in exported.folder.rglob("*.onnx"):
        content = path.read_bytes()
        for word in (b"site-packages", b".py", b"forward", b"torch.", b"File ", b"stack"):
            assert word not in content, (path.name, word)
        found = list(texts(onnx.load_from_string(content)))
        assert "image" in found or "z" in found
        assert not [t for t in found if "/" in t or "\\" in t or "\n" in t]


def test_the_verdict_is_the_records_claim() -> None:
    record = {
        "accuracy": 0.9, "strongest": {"mse": 0.04}, "leakage": 0.1, "attacks": {"a": 1},
        "audit": {"profile": "quick"}, "flags": [{"name": "few-images", "seen": "3"}],
    }  # fmt: skip
    found = audit_summary(record)
    assert found == {
        "accuracy": 0.9, "strongest": {"mse": 0.04}, "worst_case": None, "ceiling": None,
        "leakage": 0.1, "sent": None, "leakage_sent": None, "exposure": None,
        "true_rate_nats": None, "audit": {"profile": "quick"},
        "flags": ["few-images"],
    }  # fmt: skip
    assert json.dumps(found)


def test_an_attacker_makes_the_same_images_in_onnx(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.ConvTranspose2d(2, 1, 3, 2, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())
    net(torch.randn(8, 2, 4, 4))  # moves the statistics, which eval mode then uses
    z = torch.randn(5, 2, 4, 4)
    told = write_attacker(net, z, (1, 8, 8), tmp_path)
    assert told["attacker_max_abs_diff"] <= 1e-5
    with torch.no_grad():
        expected = net.eval()(z[:3]).numpy()
    found = open_half((tmp_path / ATTACKER).read_bytes(), 1)(z[:3].numpy())
    assert np.abs(found - expected).max() <= 1e-5
    with pytest.raises(ExportError, match=r"makes images .1, 8, 8., expected .3, 8, 8."):
        write_attacker(net, z, (3, 8, 8), tmp_path)
