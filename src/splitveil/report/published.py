"""What others report: rows of a file, each beside records of its own dataset alone."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from splitveil.errors import RunError
from splitveil.report.fields import finite, number, parse
from splitveil.report.rows import SHARE, Group, refuse_impossible
from splitveil.report.tables import NOTHING


@dataclass(frozen=True)
class Published:
    """What others report under a row's name; accuracies are shares.

    A row that does not say its dataset stands beside records of any. `aux` is what their attacker
    knew.
    """

    accuracy: float
    mse: float
    source: str
    dataset: str | None = None
    aux: str = "train"
    reconstruction_accuracy: float | None = None
    ssim_zeropad: float | None = None
    psnr_pooled: float | None = None

    def is_of(self, datasets: Collection[str | None]) -> bool:
        """Whether the row can stand beside records of these datasets."""
        return self.dataset is None or self.dataset in datasets


def read_published(path: Path) -> dict[str, Published]:
    """Rows of a JSON file {name: {accuracy, mse, source, dataset}}; accuracies are shares."""
    try:
        data = parse(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it must hold an object of rows, got {type(data).__name__}")
        return {name: _published(name, row) for name, row in data.items()}
    except (OSError, ValueError) as err:
        raise RunError(
            f"{path} is not a file of published rows: {err}; a row is, for example, "
            '"cem": {"accuracy": 0.9, "mse": 0.01, "source": "where it is printed", '
            '"dataset": "cifar10"}'
        ) from err


def _published(name: str, given: object) -> Published:
    """A row of a file, each value of its kind; raises ValueError naming the row and the key."""
    row = finite(given)
    if not isinstance(row, dict):
        raise ValueError(f"row '{name}' must be an object, got {type(row).__name__}")
    known = [field.name for field in fields(Published)]
    strange = [f"unknown {key}" for key in row if key not in known]
    missing = [f"no {key}" for key in known[:3] if row.get(key) is None]
    if strange or missing:
        raise ValueError(f"row '{name}': {', '.join(missing + strange)}")
    for key in ("source", "dataset", "aux"):
        unsaid = key == "dataset" and row.get(key) is None
        if not unsaid and not isinstance(row.get(key, ""), str):
            raise ValueError(f"row '{name}': {key} must be a text, got {row[key]!r:.60}")
    try:
        refuse_impossible(row, dict.fromkeys(("accuracy", "mse", "reconstruction_accuracy"), SHARE))
        for key in ("ssim_zeropad", "psnr_pooled"):
            number(row, key)
    except RunError as err:
        raise ValueError(f"row '{name}': {err}") from err
    return Published(**row)


def reported(group: Group, published: Mapping[str, Published]) -> Published | None:
    """What is published under a row's name, of the same dataset and attacker's knowledge.

    Folders say `arl-cem` for the stack `arl+cem`.
    """
    said = published.get(group.name) or published.get(group.name.replace("-", "+"))
    if said is None or not said.is_of(group.distinct("config", "dataset")):
        return None
    return said if group.distinct("audit", "aux") == [said.aux] else None


def elsewhere(published: Mapping[str, Published], datasets: Collection[str]) -> list[str]:
    """A line that counts the published rows of other datasets than these, which are not shown."""
    counts = Counter(said.dataset for said in published.values() if not said.is_of(datasets))
    named = ", ".join(f"{dataset} ({count})" for dataset, count in sorted(counts.items()))
    met = ", ".join(sorted(datasets)) or NOTHING
    return [f"published rows of another dataset left out: {named}; records: {met}"] if named else []
