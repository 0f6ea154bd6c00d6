import ast
from pathlib import Path

import pytest

from splitveil import data
from splitveil.data.catalogue import DATASETS, load
from splitveil.errors import ConfigError, DataError


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'cifar10'.*choose from: .*digits"):
        load("cifar-10")


@pytest.mark.parametrize("name", ["folder", "folder:", "npz"])
def test_a_missing_path_is_asked_for(name: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a path; write \w+:PATH"):
        load(name)


@pytest.mark.parametrize("name", ["digits:", "cifar10:/data"])
def test_a_superfluous_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"takes no path, got '{name}'"):
        load(name)


def test_no_module_imports_sklearn_when_it_is_imported_itself() -> None:
    for path in Path(data.__file__).parent.glob("*.py"):
        top = ast.parse(path.read_text()).body
        named = [node.module or "" for node in top if isinstance(node, ast.ImportFrom)]
        plain = [a.name for node in top if isinstance(node, ast.Import) for a in node.names]
        assert not [name for name in named + plain if name.split(".")[0] == "sklearn"], path


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=f"there is no {tmp_path}/photos"):
        load("folder:~/photos")


def test_summaries_are_one_line() -> None:
    assert all("\n" not in s.summary and len(s.summary) < 100 for s in DATASETS.values())
