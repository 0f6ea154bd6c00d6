"""Attacks by name.

To add an attack: a file with a frozen dataclass that has `access` and `fit`, and a line in the
profiles it belongs to, `paper` among them. An attack never measures its own success.
"""

from collections.abc import Mapping

from splitveil.attacks.profiles import PROFILES
from splitveil.types import Attack

ATTACKS: Mapping[str, type[Attack]] = {n: type(attack) for n, attack in PROFILES["paper"].items()}
