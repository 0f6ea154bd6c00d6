"""What can be reached from an object by attributes, closures and containers."""

import functools
from collections.abc import Iterator, Mapping
from types import ModuleType

from torch import Tensor, nn

PATHS = (
    "__closure__", "__self__", "__func__", "__wrapped__", "__defaults__", "__kwdefaults__",
    "__dict__", "__slots__", "cell_contents",
)  # fmt: skip


def neighbours(thing: object) -> Iterator[object]:
    """Everything one step away; classes and modules are no places to hide a model in."""
    if isinstance(thing, ModuleType | type | str | bytes | int | float | Tensor):
        return
    if isinstance(thing, Mapping):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    if isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    names = [n for n in dir(thing) if not n.startswith("__")]
    for name in (*PATHS, *names):
        try:
            yield getattr(thing, name)
        except (AttributeError, ValueError, TypeError, RuntimeError):
            continue


def reachable(start: object) -> list[object]:
    """All objects that lead from `start`, itself included, each once."""
    found: dict[int, object] = {}  # holds them, so that no id is used twice
    waiting = [start]
    while waiting:
        thing = waiting.pop()
        if id(thing) not in found:
            found[id(thing)] = thing
            waiting.extend(neighbours(thing))
    return list(found.values())


def models(start: object) -> list[object]:
    """Networks and their parameters among them."""
    return [t for t in reachable(start) if isinstance(t, nn.Module | nn.Parameter)]
