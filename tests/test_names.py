"""One name for one thing: no class or function of the package shares its name with another."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import splitveil

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
