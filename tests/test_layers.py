"""Who may import whom, and what must never run: read off the source."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import splitveil

SOURCE = Path(splitveil.__file__).parent


@dataclass(frozen=True)
class Rule:
    """What a room may import: rooms of ours, and libraries (None: any that is not banned)."""

    rooms: frozenset[str]
    libraries: frozenset[str] | None = None


def room(*rooms: str, libraries: tuple[str, ...] | None = None) -> Rule:
    return Rule(frozenset(rooms), None if libraries is None else frozenset(libraries))


FIRST_ROW = ("errors", "types", "victim", "rng", "gradient", "graphs", "similarity", "dependence")
EVERYTHING = room("*")
ON_THE_DEVICE = (
    "cache", "capture", "client", "faults", "manifest", "noise", "session", "stages", "transport",
    "wire",
)  # fmt: skip
LIGHT = ("numpy", "onnxruntime")

# The right column of the design's table of rooms; a module of its own wins over its room.
MAY_IMPORT: dict[str, Rule] = {
    "errors": room(libraries=()),
    "types": room(*FIRST_ROW, libraries=("torch",)),
    "victim": room("errors", libraries=("torch",)),
    "rng": room(*FIRST_ROW, libraries=("torch",)),
    "gradient": room(*FIRST_ROW, libraries=("torch",)),
    "graphs": room(libraries=("torch",)),
    "similarity": room(libraries=("torch",)),
    "dependence": room(libraries=("torch",)),
    "data": room(*FIRST_ROW),
    "nets": room(*FIRST_ROW),
    "surrogates": room(*FIRST_ROW, libraries=("torch", "einops", "jaxtyping")),
    "defences": room(*FIRST_ROW, "surrogates", "nets"),
    "train": room(*FIRST_ROW),
    "attacks": room(*FIRST_ROW, "nets"),
    "audit": EVERYTHING,
    "audits": EVERYTHING,
    "report": room("types", "errors"),
    "serve": room(*FIRST_ROW, "nets", "train.checkpoint"),
    "serve.faults": room("errors", libraries=()),
    **{
        f"serve.{n}": room(*(f"serve.{o}" for o in ON_THE_DEVICE), libraries=LIGHT)
        for n in ON_THE_DEVICE
        if n != "faults"
    },
    "serve.server": room("serve", "errors", libraries=(*LIGHT, "starlette", "uvicorn")),
    "settings": room("errors"),
    "imports": room("errors", libraries=("torch",)),
    "passport": room("types", "__version__"),
    "console": room(),
    "config": EVERYTHING,
    "runs": EVERYTHING,
    "teaching": EVERYTHING,
    "training": EVERYTHING,
    "keeping": EVERYTHING,
    "reproduce": EVERYTHING,
    "sweep": EVERYTHING,
    "doctor": room("errors", "types", "report"),
    "doctor.reading": room("errors", "types", "settings", "report", "runs", "doctor"),
    "explain": room("errors", "types", "report"),
    "explaining": EVERYTHING,
    "replay": EVERYTHING,
    "comparing": room("errors", "types", "audit.statistics", "report"),
    "unrounded": room("errors", "types", "audit.statistics", "report", "comparing"),
    "bench": room("types", "passport", "surrogates"),
    "recipes": room("errors", libraries=()),
    "trials": EVERYTHING,
    "advisor": EVERYTHING,
    "commands": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": room("cli"),
    "__init__": EVERYTHING,
}

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
MAY_CALL = {("__init__", "import_module")}


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


def covers(allowed: str, target: str) -> bool:
    return allowed in ("*", target) or target.startswith(f"{allowed}.")


def rule_of(module: str) -> tuple[str, Rule | None]:
    """The rule of a module such as `nets.split`: its own, or its room's."""
    key = module if module in MAY_IMPORT else module.partition(".")[0]
    return key, MAY_IMPORT.get(key)


def import_fault(name: str, key: str, rule: Rule) -> str | None:
    top, _, rest = name.partition(".")
    if top in BANNED_LIBRARIES:
        return f"{top} is banned: {BANNED_LIBRARIES[top]}"
    if top == "splitveil":
        if any(covers(allowed, rest) for allowed in (key, *rule.rooms)):
            return None
        return f"{key} may import {', '.join(sorted(rule.rooms)) or 'nothing of ours'}, not {name}"
    if rule.libraries is None or top in sys.stdlib_module_names or top in rule.libraries:
        return None
    known = ", ".join(sorted(rule.libraries)) or "the standard library"
    return f"{key} may use only {known}, not {top}"


def call_fault(call: ast.Call, key: str) -> str | None:
    name = ast.unparse(call.func)
    short = (
        name if name in BANNED_CALLS else name.removeprefix("importlib.").removeprefix("builtins.")
    )
    if short in BANNED_CALLS and (key, short) not in MAY_CALL:
        return f"{short}() is banned: {BANNED_CALLS[short]}"
    for word in call.keywords:
        if word.arg == "allow_pickle" and ast.unparse(word.value) != "False":
            return "allow_pickle is banned: bytes from a stranger are data, never code"
    return None


def faults(path: Path, source: Path) -> list[str]:
    """What is wrong with one file of the package at `source`, as `file:line: rule`."""
    parts = path.relative_to(source).with_suffix("").parts
    module = (
        ".".join(parts) if parts == ("__init__",) else ".".join(parts).removesuffix(".__init__")
    )
    key, rule = rule_of(module)
    where = path.relative_to(source.parent)
    if rule is None:
        return [f"{where}:1: {module} has no rule; add its room to MAY_IMPORT"]
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    package = ".".join(("splitveil", *parts[:-1]))
    found = [
        (i.line, fault)
        for i in imports_of(tree, package)
        if (fault := import_fault(i.name, key, rule))
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found += [(c.lineno, fault) for c in calls if (fault := call_fault(c, key))]
    return [f"{where}:{line}: {fault}" for line, fault in sorted(found)]


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_house_keeps_its_rules(path: Path) -> None:
    assert faults(path, SOURCE) == []


def test_the_walk_reaches_every_room_that_exists() -> None:
    rooms = {p.relative_to(SOURCE).with_suffix("").parts[0] for p in files()}
    assert {"nets", "attacks", "audit", "defences", "surrogates", "train", "data"} <= rooms
    assert rooms <= {key.partition(".")[0] for key in MAY_IMPORT}


def test_the_laws_of_the_table() -> None:
    attacks = MAY_IMPORT["attacks"].rooms
    assert not attacks & {"*", "defences", "train", "data", "audit"}
    assert MAY_IMPORT["report"].rooms == {"types", "errors"}
    assert MAY_IMPORT["serve"].rooms == {*FIRST_ROW, "nets", "train.checkpoint"}


PLANTED = [
    ("attacks/spy.py", "from splitveil.defences import DEFENCES", 1, "attacks may import"),
    ("attacks/spy.py", "import splitveil.train.loop", 1, "not splitveil.train.loop"),
    ("attacks/spy.py", "from splitveil import data", 1, "not splitveil.data"),
    ("attacks/spy.py", "import splitveil", 1, "not splitveil"),
    ("attacks/spy.py", "from ..audit import metrics", 1, "not splitveil.audit.metrics"),
    ("attacks/spy.py", "from .. import data", 1, "not splitveil.data"),
    (
        "attacks/spy.py",
        "def f():\n    from splitveil.data import load",
        2,
        "not splitveil.data.load",
    ),
    ("attacks/spy.py", "if x:\n    pass\nelse:\n    import splitveil.data", 4, "splitveil.data"),
    ("attacks/spy.py", "m = importlib.import_module('splitveil.data')", 1, "import_module"),
    ("attacks/spy.py", "m = __import__('splitveil.data')", 1, "__import__"),
    ("report/spy.py", "from splitveil.nets import cut", 1, "report may import errors, types"),
    ("report/spy.py", "from splitveil.rng import stream", 1, "not splitveil.rng.stream"),
    ("nets/spy.py", "import torchvision", 1, "torchvision is banned"),
    ("data/spy.py", "def f():\n    from torchvision.datasets import CIFAR10", 2, "torchvision"),
    ("surrogates/spy.py", "import numpy", 1, "einops, jaxtyping, torch, not numpy"),
    ("errors.py", "import torch", 1, "errors may use only the standard library, not torch"),
    ("settings.py", "from splitveil.types import Json", 1, "settings may import errors"),
    ("console.py", "from splitveil.errors import ConfigError", 1, "nothing of ours"),
    ("passport.py", "from splitveil import fit", 1, "not splitveil.fit"),
    ("serve/client.py", "import torch", 1, "numpy, onnxruntime, not torch"),
    ("serve/client.py", "from splitveil.types import Json", 1, "serve.client may import"),
    ("serve/export.py", "from splitveil.train.loop import train", 1, "not splitveil.train.loop"),
    ("serve/export.py", "from splitveil.train import Schedule", 1, "splitveil.train.Schedule"),
    ("train/spy.py", "x = torch.load('a')", 1, r"torch.load() is banned"),
    ("train/spy.py", "import pickle", 1, "pickle is banned"),
    ("train/spy.py", "from pickle import loads", 1, "pickle is banned"),
    ("cli.py", "import pickle", 1, "pickle is banned"),
    ("data/spy.py", "np.load(f, allow_pickle=True)", 1, "allow_pickle is banned"),
    ("nets/spy.py", "eval('1')", 1, "eval() is banned"),
    ("nets/spy.py", "y = [exec(t) for t in x]", 1, "exec() is banned"),
    ("kitchen/sink.py", "x = 1", 1, "kitchen.sink has no rule"),
    ("utils.py", "x = 1", 1, "utils has no rule"),
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
    ("attacks/spy.py", "from splitveil.nets import cut\nfrom splitveil.attacks.seeding import x"),
    ("attacks/spy.py", "from . import seeding\nfrom .linear import ridge\nimport numpy, math"),
    ("attacks/__init__.py", "from .linear import ridge\nfrom ..rng import stream"),
    ("serve/export.py", "from splitveil.train.checkpoint import read_checkpoint"),
    ("serve/export.py", "from splitveil.train import checkpoint"),
    ("serve/client.py", "import numpy\nimport json\nfrom splitveil.serve.wire import decode"),
    ("passport.py", "from splitveil import __version__"),
    ("nets/spy.py", "model.eval()\nre.compile('a')\nnp.load(f, allow_pickle=False)"),
    ("nets/long.py", "x = 1\n" * 300),
    ("cli.py", "from splitveil.audit import metrics\nimport splitveil"),
    ("__init__.py", "x = import_module(f'splitveil.{name}')"),
]


@pytest.mark.parametrize(("file", "text"), ALLOWED)
def test_what_is_allowed_passes(file: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "splitveil" / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert faults(path, tmp_path / "splitveil") == []
