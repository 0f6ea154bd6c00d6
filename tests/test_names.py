"""One name for one thing, and what a public name says of itself."""

import ast
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import splitveil
from splitveil.defences.base import PenaltyPlan

SOURCE = Path(splitveil.__file__).parent

# The same thing in several files: a plug-in's part, a command and the call behind it, or the twin
# of a function that a device cannot import, because it has no torch.
SHARED = {
    "assemble": "data/",
    "class_names": "data/",
    "read": "data/",
    "audit": "cli/",
    "audit_encoder": "cli/",
    "audit_wire": "cli/",
    "replay": "cli/",
    "reproduce": "cli/",
    "serve": "cli/",
    "check_images": "serve/client.py",
    "Stage": "serve/stages.py",
    "sureness": "serve/exits.py",
    "ssim": "audits/metrics.py",
}


def defined(file: Path) -> Iterator[tuple[str, bool]]:
    """Public names at the top of a module, and whether each is a class or a function."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, True
        elif isinstance(node, ast.Assign):
            yield from ((t.id, False) for t in node.targets if isinstance(t, ast.Name))


def test_a_class_or_function_has_its_name_for_itself() -> None:
    homes: defaultdict[str, set[str]] = defaultdict(set)
    kinds: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for name, is_code in defined(file):
            if not name.startswith("_"):
                homes[name].add(file.relative_to(SOURCE).as_posix())
                kinds |= {name} if is_code else set()
    twice = {name: sorted(homes[name]) for name in kinds if len(homes[name]) > 1}
    known = {n for n, place in SHARED.items() if any(f.startswith(place) for f in homes[n])}
    assert {name: twice[name] for name in twice.keys() - known} == {}
    assert SHARED.keys() <= twice.keys(), "remove what is no longer shared"


def public_names() -> dict[str, object]:
    """Classes and functions of the package and its rooms that `__all__` lists, by full name."""
    rooms = [
        m.name for m in pkgutil.iter_modules(splitveil.__path__) if m.ispkg and m.name != "cli"
    ]
    modules = [splitveil, *(import_module(f"splitveil.{room}") for room in rooms)]
    found: dict[int, tuple[str, object]] = {}
    for module in modules:
        for name in getattr(module, "__all__", []):
            thing = getattr(module, name)
            if isinstance(thing, type | FunctionType):
                found.setdefault(id(thing), (f"{module.__name__}.{name}", thing))
    return dict(found.values())


PUBLIC = {
    name: thing
    for name, thing in public_names().items()
    if not (isinstance(thing, type) and issubclass(thing, Exception))
}


def documents(thing: object) -> str:
    """Its docstring with those it stands on: bases, constructor, and what it names as its own."""
    texts = [thing.__doc__ or ""]
    if isinstance(thing, type):
        texts += [base.__doc__ or "" for base in thing.__mro__[1:-1]]
        texts.append(vars(thing).get("__init__", thing).__doc__ or "")
        texts.append(getattr(getattr(thing, "estimator", None), "__doc__", None) or "")
        texts.append(PenaltyPlan.__doc__ or "" if "`PenaltyPlan`" in texts[0] else "")
    return "\n".join(texts)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_documents_its_arguments_its_result_and_an_example(name: str) -> None:
    thing: Any = PUBLIC[name]
    own, known = thing.__doc__ or "", documents(thing)
    assert ">>> " in own or "Example:" in own
    parameters = [p for p in inspect.signature(thing).parameters if p not in {"self", "kwargs"}]
    missing = [p for p in parameters if not re.search(rf"^\s+{p}: \S", known, re.MULTILINE)]
    assert missing == []
    returned = inspect.signature(thing).return_annotation
    if not isinstance(thing, type) and returned is not None:
        assert "Returns:" in own
