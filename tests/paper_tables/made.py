"""Commands that paper/headline.py plans, and their settings."""

from collections.abc import Callable

from splitveil.config.run_config import parse_pair

Called = Callable[..., tuple[int, str, str]]
Planned = Callable[..., list[list[str]]]


def settings_of(command: list[str]) -> dict[str, object]:
    words = [w for w in command[2:] if w != "--final"]
    pairs = [(k, v) for k, v in zip(words[::2], words[1::2], strict=True) if "-dir" not in k]
    return dict(parse_pair(v if k == "--set" else f"{k[2:]}={v}") for k, v in pairs)
