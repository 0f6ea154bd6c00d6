"""What a reader is asked, and how the catalogue describes it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitveil.data.dataset import Dataset
from splitveil.errors import DataError
from splitveil.types import Progress, silent


@dataclass(frozen=True, kw_only=True)
class Request:
    """Read a dataset: archives lie under `root`; `path` is what stood behind the colon.

    `whole`: its images are used together, none for training.
    """

    root: Path
    path: Path | None = None
    progress: Progress = silent
    whole: bool = False

    def existing_path(self) -> Path:
        """The path the user gave, which must be there."""
        if self.path is None or not self.path.exists():
            raise DataError(f"there is no {self.path}; give an existing path after the colon")
        return self.path


@dataclass(frozen=True, kw_only=True)
class Source:
    """One line of the catalogue: what it is, whether it needs a path, and its reader."""

    summary: str
    needs_path: bool
    read: Callable[[Request], Dataset]
