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


@contextmanager
def unchanged() -> Iterator[None]:
    """What changes of torch's default type, its gradients and the current folder lasts inside."""
    import torch

    dtype, gradients, folder = torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        os.chdir(folder)


def find_safely(name: str, what: str) -> object:
    """What MODULE:FUNCTION stands for; its import may neither end this process nor change torch."""
    try:
        with unchanged():
            found: object = find_object(name, what)
    except SystemExit as err:
        raise ConfigError(
            f"'{name.partition(':')[0]}' ends the process when it is imported (exit {err.code}); "
            "put what it does as a script below: if __name__ == '__main__':"
        ) from err
    return found
