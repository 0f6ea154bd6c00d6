"""The audits: attacks on a deployed client, and what they got."""

from splitveil.audits.access import Case, Wire, intercept
from splitveil.audits.flags import FLAGS, Evidence, Flag, raise_flags
from splitveil.audits.gallery import gallery
from splitveil.audits.suite import Store, accuracy, run_attacks
from splitveil.audits.summary import (
    by_attack,
    ceiling_mse,
    floor_mse,
    per_image,
    strongest,
    strongest_blackbox,
    worst_case,
)
from splitveil.audits.target import Attempt

__all__ = [
    "FLAGS",
    "Attempt",
    "Case",
    "Evidence",
    "Flag",
    "Store",
    "Wire",
    "accuracy",
    "by_attack",
    "ceiling_mse",
    "floor_mse",
    "gallery",
    "intercept",
    "per_image",
    "raise_flags",
    "run_attacks",
    "strongest",
    "strongest_blackbox",
    "worst_case",
]
