"""`splitveil clients --backbone`: the cuts of a user's own net."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli.calling import call, text

import splitveil as sv
from splitveil.nets.catalogue import find_net

MY_NETS = """
from torch import nn

def sized(image_shape, num_classes):
    c, h, w = image_shape
    return nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.Flatten(),
                         nn.Linear(8 * h * w, num_classes))

def fixed():
    return sized((1, 4, 4), 2)

def keyed(image_shape, num_classes, depth):
    return fixed()

def wrong():
    return nn.Linear(2, 2)

def rises():
    raise KeyError("weights")

def leaves():
    raise SystemExit(0)

def empty():
    return nn.Sequential()

class AVeryLongNameOfALayerIndeed(nn.Identity):
    pass

def long():
    return nn.Sequential(AVeryLongNameOfALayerIndeed(), nn.Flatten(), nn.Linear(3072, 2))

class Own(nn.Sequential):
    def __init__(self, image_shape, num_classes):
        super().__init__(*sized(image_shape, num_classes))

net = nn.Sequential(nn.Flatten(), nn.Flatten())
number = 3
"""


@pytest.fixture
def my_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, under a name no other test has imported."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MY_NETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("function", ["sized", "fixed"])
def test_the_cuts_of_an_own_backbone_are_listed(my_nets: str, function: str) -> None:
    words = ("clients", "--macs", "5000", "--wire", "50", "--image", "1x4x4", "--backbone")
    path = list(sys.path)
    result = call(*words, f"{my_nets}:{function}")
    assert result.exit_code == 0, text(result)
    assert sys.path == path
    lines = result.stdout.splitlines()
    assert lines[0] == "2 cuts of the backbone, for images 1x4x4"
    assert lines[2].split()[:6] == ["1", "Conv2d", "8x4x4", "0.00", "80", "128"]
    assert lines[2].endswith(
        "with 3×3 convolution to 3 channels and sigmoid: 0.00 MMAC, 299 params, wire 48"
    )
    assert lines[3].split() == ["2", "Flatten", "128", "0.00", "80", "128", "no"]
    found = json.loads(call(*words, f"{my_nets}:{function}", "--json").stdout)
    assert found["cuts"][0]["bottleneck"]["channels"] == 3
    assert found["cuts"][1]["bottleneck"] is None


@pytest.mark.parametrize(
    ("name", "at", "wire"), [("resnet20", 5, 2048), ("mobilenetv2", 8, 512), ("vgg11", 4, 512)]
)
def test_the_cuts_of_a_named_net_are_listed(name: str, at: int, wire: int) -> None:
    result = call("clients", "--macs", "30e6", "--wire", str(wire), "--backbone", name, "--json")
    assert result.exit_code == 0, text(result)
    cuts = json.loads(result.stdout)["cuts"]
    assert cuts[at - 1]["wire_floats"] == wire
    assert cuts[at - 1]["fits"]


@pytest.mark.parametrize(
    ("name", "places", "end"),
    [
        ("vgg11", range(1, 13), "vgg11@N"),
        ("resnet20", range(1, 11), "resnet20@N"),
        ("resnet20@8", [8], "resnet20@8"),
        ("small", [1], "small"),
    ],
)
def test_listed_cuts_are_those_that_training_builds(
    name: str, places: Sequence[int], end: str
) -> None:
    words = ("clients", "--macs", "30e6", "--wire", "512", "--backbone", name)
    cuts = json.loads(call(*words, "--json").stdout)["cuts"]
    assert [cut["at"] for cut in cuts] == list(places)
    for cut in cuts if "@N" in end else ():
        net = find_net(end.replace("N", str(cut["at"])))
        model = sv.nets.cut(net.build((3, 32, 32), 10), net.cut_at)
        assert cut["macs"] == model.macs((3, 32, 32))
        assert (cut["params"], cut["wire_floats"]) == (
            model.client_params(),
            model.wire_floats((3, 32, 32)),
        )
    fits = any(cut["fits"] for cut in cuts)
    assert fits == (name in {"vgg11", "small"})
    told = f"train --net {end} --dataset NAME" if fits else "clients --macs 30000000 --wire 512"
    assert f"next: splitveil {told}" in text(call(*words))


@pytest.mark.parametrize(
    ("name", "least"),
    [("resnet20", 4), ("vgg11", 32), ("small", 4), ("thin-deep", 8), ("splitveil.nets:vgg11", 32)],
)
def test_images_that_are_too_small_are_refused(name: str, least: int) -> None:
    words = ("clients", "--macs", "30e6", "--wire", "512", "--image", "3x2x2", "--backbone", name)
    result = call(*words)
    assert result.exit_code == 2
    assert f"at least {least}×{least}, got (3, 2, 2)" in text(result)
    assert re.search("; (use larger images|resize them)", text(result))
    assert "--net" not in text(result)


def test_an_own_sequential_class_is_cut(my_nets: str) -> None:
    words = ("clients", "--macs", "5e6", "--wire", "50", "--image", "1x4x4", "--json", "--backbone")
    own, plain = (json.loads(call(*words, f"{my_nets}:{name}").stdout) for name in ("Own", "sized"))
    assert own == plain
    assert own["cuts"][0]["params"] == 8 * 9 + 8


def test_a_layer_with_a_long_name_moves_no_column(my_nets: str) -> None:
    shown = call("clients", "--macs", "5e6", "--wire", "50", "--backbone", f"{my_nets}:long")
    heads, first, second = shown.stdout.splitlines()[1:4]
    ends = [line.rindex(word) + 4 for line, word in ((heads, "wire"), (first, "3072"))]
    assert ends == [ends[0]] * 2
    assert second.rindex("3072") == first.rindex("3072")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("absent", "cannot import 'absent' from"),
        ("number", "must be a function, got a int"),
        ("net", "must be a function, got a Sequential"),
        ("keyed", "must take (image_shape, num_classes) or nothing, not (image_shape, "),
        ("wrong", "must return an nn.Sequential, got a Linear; wrap the stages"),
        ("rises", "failed: KeyError: 'weights'"),
        ("leaves", "failed: SystemExit: 0"),
        ("empty", "a backbone of no children cannot be cut; wrap its stages"),
    ],
)
def test_a_bad_backbone_exits_with_2(my_nets: str, function: str, said: str) -> None:
    result = call("clients", "--macs", "5e6", "--wire", "50", "--backbone", f"{my_nets}:{function}")
    assert result.exit_code == 2, text(result)
    assert said in text(result)
    assert "Traceback" not in text(result)


def test_a_broken_module_exits_with_2(my_nets: str, tmp_path: Path) -> None:
    (tmp_path / f"{my_nets}_b.py").write_text("def (", encoding="utf-8")
    for module, said in ((f"{my_nets}_a", "ModuleNotFoundError"), (f"{my_nets}_b", "SyntaxError")):
        result = call("clients", "--macs", "5e6", "--wire", "50", "--backbone", f"{module}:f")
        assert result.exit_code == 2, text(result)
        assert said in text(result)
