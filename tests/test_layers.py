"""Who may import whom, what stands at the top level, what must never run: read off the source."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import splitveil

SOURCE = Path(splitveil.__file__).parent

# From the ground up. A module may import its own room and everything in a lower layer, lazily or
# not, and nothing else. The ground is single modules: there the order of the list counts.
GROUND = (
    "errors", "io", "grid", "rng", "cuda", "functional", "provenance", "table", "threat",
)  # fmt: skip
LAYERS: tuple[tuple[str, ...], ...] = (
    GROUND,
    ("record", "data", "nets", "surrogates"),
    ("defences", "attacks"),
    ("config", "serve"),
    ("train",),
    ("audits",),
    ("runs",),
    ("report",),
    ("insight", "experiments"),
    ("cli",),
    ("__main__",),
)
TOP_LEVEL = {"__init__", "__main__", *GROUND, "runs"}

# What runs on the device is light: these import each other, three modules and two libraries.
DEVICE = tuple(
    f"serve.{name}"
    for name in (
        "client",
        "draws",
        "exits",
        "manifest",
        "noise",
        "runtime",
        "signature",
        "stages",
        "transport",
        "wire",
    )
)
ORT_HOME = "serve.runtime"  # switches the library's telemetry off before it is loaded
SIGNER = "serve.signature"  # loads cryptography inside its functions only
DEVICE_LIBRARIES = ("numpy", "onnxruntime")

BANNED_LIBRARIES = {
    "torchvision": "cannot be imported beside the CPU build of torch",
    "pickle": "bytes from a stranger are data, never code",
    "cloudpickle": "bytes from a stranger are data, never code",
    "dill": "bytes from a stranger are data, never code",
    "joblib": "unpickles what it loads",
    "marshal": "bytes from a stranger are data, never code",
    "shelve": "unpickles what it loads",
}
BANNED_CALLS = {
    "eval": "runs text",
    "exec": "runs text",
    "compile": "runs text",
    "__import__": "hides an import from this test",
    "import_module": "hides an import from this test",
    "torch.load": "unpickles what it loads; checkpoints are safetensors",
    "torch.save": "pickles what it saves; checkpoints are safetensors",
}
MAY_CALL = {("__init__", "import_module"), ("serve", "import_module")}  # the lazy tables of names


@dataclass(frozen=True)
class Import:
    """A dotted name and the line that imports it."""

    name: str
    line: int


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Everything imported anywhere in a file, inside functions too; `package` holds the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            start = ".".join(above) if node.level else ""
            base = ".".join(part for part in (start, node.module) if part)
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)


def layer_of(room: str) -> int | None:
    found = [number for number, rooms in enumerate(LAYERS) if room in rooms]
    return found[0] if found else None


def may_import(room: str, other: str) -> bool:
    """Whether a module of `room` may import from `other`."""
    if room in (other, "__init__") or other == "__version__":
        return True
    mine, theirs = layer_of(room), layer_of(other)
    if mine is None or theirs is None:
        return False
    if mine == theirs == 0:
        return GROUND.index(other) < GROUND.index(room)
    return theirs < mine


def import_fault(name: str, module: str) -> str | None:
    top, _, rest = name.partition(".")
    if top in BANNED_LIBRARIES:
        return f"{top} is banned: {BANNED_LIBRARIES[top]}"
    if top == "onnxruntime" and module != ORT_HOME:
        return f"onnxruntime is imported by {ORT_HOME} only, which switches its telemetry off"
    if module in DEVICE:
        return device_fault(name, module)
    if top != "splitveil":
        return None
    room, other = module.partition(".")[0], rest.partition(".")[0]
    if may_import(room, other):
        return None
    return f"{room} may import lower layers only, not {name}"


def device_fault(name: str, module: str) -> str | None:
    top, _, rest = name.partition(".")
    if top == "cryptography" and module == SIGNER:
        return None
    if top == "splitveil":
        ours = (*DEVICE, "errors", "grid", "io")
        if rest == "__version__" or any(rest == o or rest.startswith(f"{o}.") for o in ours):
            return None
        return f"{module} runs on the device: it may not import {name}"
    if top in sys.stdlib_module_names or top in DEVICE_LIBRARIES:
        return None
    return (
        f"{module} runs on the device: it may use only {' and '.join(DEVICE_LIBRARIES)}, not {top}"
    )


def call_fault(call: ast.Call, module: str) -> str | None:
    name = ast.unparse(call.func)
    short = (
        name if name in BANNED_CALLS else name.removeprefix("importlib.").removeprefix("builtins.")
    )
    if short in BANNED_CALLS and (module, short) not in MAY_CALL:
        return f"{short}() is banned: {BANNED_CALLS[short]}"
    for word in call.keywords:
        if word.arg == "allow_pickle" and ast.unparse(word.value) != "False":
            return "allow_pickle is banned: bytes from a stranger are data, never code"
    return None


def module_of(path: Path, source: Path) -> str:
    """'nets.split' for nets/split.py, 'nets' for its `__init__`, '__init__' for the package's."""
    parts = path.relative_to(source).with_suffix("").parts
    return parts[0] if len(parts) == 1 else ".".join(parts).removesuffix(".__init__")


def faults(path: Path, source: Path) -> list[str]:
    """What is wrong with one file of the package at `source`, as `file:line: rule`."""
    parts = path.relative_to(source).with_suffix("").parts
    module = module_of(path, source)
    where = path.relative_to(source.parent)
    if len(parts) == 1 and module not in TOP_LEVEL:
        return [f"{where}:1: {module} does not belong at the top level; put it into a room"]
    if module != "__init__" and layer_of(module.partition(".")[0]) is None:
        return [f"{where}:1: {module} has no layer; add its room to LAYERS"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ".".join(("splitveil", *parts[:-1]))
    found = [
        (i.line, fault)
        for i in imports_of(tree, package)
        if (fault := import_fault(i.name, module))
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found += [(c.lineno, fault) for c in calls if (fault := call_fault(c, module))]
    return [f"{where}:{line}: {fault}" for line, fault in sorted(found)]


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_house_keeps_its_rules(path: Path) -> None:
    assert faults(path, SOURCE) == []


def test_every_room_of_the_list_exists_and_no_other() -> None:
    rooms = {p.relative_to(SOURCE).with_suffix("").parts[0] for p in files()}
    assert rooms == {room for layer in LAYERS for room in layer} | {"__init__"}


def graph(source: Path) -> dict[str, set[str]]:
    """Module → modules it imports, lazily or not; a room's `__init__` only passes names on."""
    known = {module_of(p, source): p for p in sorted(source.rglob("*.py"))}
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        if module == "__init__":
            continue
        package = ".".join(("splitveil", *path.relative_to(source).parts[:-1]))
        names = [
            i.name.removeprefix("splitveil.")
            for i in imports_of(ast.parse(path.read_text(encoding="utf-8")), package)
            if i.name.startswith("splitveil.")
        ]
        reached = {n if n in known else n.rpartition(".")[0] for n in names}
        edges[module] = {r for r in reached if r in known} - {module}
    return edges


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """A cycle of modules, or an empty list."""
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module not in done:
            for other in sorted(edges.get(module, ())):
                if found := walk(other, [*trail, module]):
                    return found
            done.add(module)
        return []

    for module in sorted(edges):
        if found := walk(module, []):
            return found
    return []


def test_no_module_reaches_itself_through_its_imports() -> None:
    assert cycle_in(graph(SOURCE)) == []


def test_a_planted_cycle_is_found(tmp_path: Path) -> None:
    room = tmp_path / "splitveil" / "nets"
    room.mkdir(parents=True)
    (room / "a.py").write_text("from splitveil.nets.b import x\n", encoding="utf-8")
    (room / "b.py").write_text("def f():\n    from splitveil.nets import a\n", encoding="utf-8")
    assert cycle_in(graph(tmp_path / "splitveil")) == ["nets.a", "nets.b", "nets.a"]


def test_no_module_bears_the_name_of_a_public_function() -> None:
    public = {n for n in splitveil.__all__ if callable(getattr(splitveil, n))}
    modules = {
        p.stem
        for p in files()
        if p.name != "__init__.py" and p.relative_to(SOURCE).parts[0] != "cli"
    }
    rooms = {p.parent.name for p in files() if p.name == "__init__.py"} - {"splitveil"}
    assert not public & (modules | rooms)


PLANTED = [
    ("attacks/spy.py", "from splitveil.defences import DEFENCES", 1, "not splitveil.defences"),
    ("attacks/spy.py", "import splitveil.train.loop", 1, "not splitveil.train.loop"),
    ("attacks/spy.py", "import splitveil", 1, "not splitveil"),
    ("attacks/spy.py", "from ..audits import metrics", 1, "not splitveil.audits.metrics"),
    ("data/spy.py", "from .. import nets", 1, "not splitveil.nets"),
    ("data/spy.py", "def f():\n    from splitveil.record import files", 2, "splitveil.record"),
    ("data/spy.py", "if x:\n    pass\nelse:\n    import splitveil.nets", 4, "splitveil.nets"),
    ("attacks/spy.py", "m = importlib.import_module('splitveil.data')", 1, "import_module"),
    ("attacks/spy.py", "m = __import__('splitveil.data')", 1, "__import__"),
    ("report/spy.py", "from splitveil.insight import diagnosis", 1, "not splitveil.insight"),
    ("audits/spy.py", "from splitveil.runs import Run", 1, "not splitveil.runs.Run"),
    ("insight/spy.py", "from splitveil.experiments import demo", 1, "splitveil.experiments"),
    ("io.py", "from splitveil.table import Table", 1, "io may import lower layers only"),
    ("errors.py", "from splitveil.rng import stream", 1, "not splitveil.rng.stream"),
    ("nets/spy.py", "import torchvision", 1, "torchvision is banned"),
    ("serve/client.py", "import onnxruntime", 1, "which switches its telemetry off"),
    ("serve/spy.py", "def f():\n    from onnxruntime import quantization", 2, "serve.runtime only"),
    ("data/spy.py", "def f():\n    from torchvision.datasets import CIFAR10", 2, "torchvision"),
    ("serve/client.py", "from cryptography.exceptions import InvalidSignature", 1, "not crypto"),
    ("serve/client.py", "import torch", 1, "numpy and onnxruntime, not torch"),
    ("serve/client.py", "from splitveil.rng import stream", 1, "it may not import splitveil.rng"),
    ("serve/export.py", "from splitveil.train.loop import train", 1, "not splitveil.train.loop"),
    ("train/spy.py", "x = torch.load('a')", 1, r"torch.load() is banned"),
    ("train/spy.py", "import pickle", 1, "pickle is banned"),
    ("train/spy.py", "from pickle import loads", 1, "pickle is banned"),
    ("cli/app.py", "import pickle", 1, "pickle is banned"),
    ("data/spy.py", "np.load(f, allow_pickle=True)", 1, "allow_pickle is banned"),
    ("nets/spy.py", "eval('1')", 1, "eval() is banned"),
    ("nets/spy.py", "y = [exec(t) for t in x]", 1, "exec() is banned"),
    ("kitchen/sink.py", "x = 1", 1, "kitchen.sink has no layer"),
    ("utils.py", "x = 1", 1, "utils does not belong at the top level"),
]


@pytest.mark.parametrize(("file", "text", "line", "message"), PLANTED)
def test_a_planted_fault_is_found_at_its_line(
    file: str, text: str, line: int, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "splitveil" / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    found = faults(path, tmp_path / "splitveil")
    assert len(found) == 1
    assert found[0].startswith(f"splitveil/{file}:{line}: ")
    assert message in found[0]


ALLOWED = [
    ("attacks/spy.py", "from splitveil.nets import cut\nfrom splitveil.attacks.base import x"),
    ("attacks/spy.py", "from . import base\nfrom .linear import ridge\nimport numpy, math"),
    ("attacks/__init__.py", "from .linear import ridge\nfrom ..rng import stream"),
    ("serve/client.py", "import numpy\nimport json\nfrom splitveil.serve.wire import decode"),
    ("serve/client.py", "from splitveil.errors import WireError"),
    ("provenance.py", "from splitveil import __version__"),
    ("nets/spy.py", "model.eval()\nre.compile('a')\nnp.load(f, allow_pickle=False)"),
    ("nets/long.py", "x = 1\n" * 900),
    ("cli/app.py", "from splitveil.audits import metrics\nfrom splitveil.runs import fit"),
    ("__init__.py", "x = import_module(f'splitveil.{name}')"),
]


@pytest.mark.parametrize(("file", "text"), ALLOWED)
def test_what_is_allowed_passes(file: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "splitveil" / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert faults(path, tmp_path / "splitveil") == []
