"""The audits: attacks on a deployed client, and what they got."""

from splitveil.audits.suite import label_only_mse, run_attacks, strongest
from splitveil.audits.target import Attempt, Target

__all__ = ["Attempt", "Target", "label_only_mse", "run_attacks", "strongest"]
