"""Defences: one file each, by name in `catalogue`."""

from splitveil.defences.base import Defence, NoiseOnly, Penalised, Stack, stack
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.defences.conditional_entropy import Cem, GatedAttention, SlotCross

__all__ = [
    "DEFENCES",
    "Cem",
    "Defence",
    "GatedAttention",
    "NoiseOnly",
    "Penalised",
    "SlotCross",
    "Stack",
    "find_defence",
    "stack",
]
