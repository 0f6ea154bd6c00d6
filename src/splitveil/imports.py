"""Objects of the user's own code by MODULE:NAME; they are looked for in the current folder too."""

import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from splitveil.errors import ConfigError


def find_object(name: str, what: str, example: str = "mycode:send") -> Any:  # noqa: ANN401 - the user's own
    """What MODULE:NAME stands for; `what` asked for it.

    >>> find_object("math:sqrt", "--server")(4.0)
    2.0
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{what} must be MODULE:FUNCTION, as {example}; got '{name}'")
    try:
        return pkgutil.resolve_name(name)
    except Exception as err:  # the user's module may raise anything
        raise ConfigError(
            f"cannot import '{attribute}' from '{module}': {type(err).__name__}: {err}; run "
            "this where the module lies, or install it"
        ) from err


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Modules of the current folder can be imported, as under `python -m`."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
