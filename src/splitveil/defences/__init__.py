"""Defences: one file each, by name in `catalogue`."""

from splitveil.defences.base import Defence, NoiseOnly, Penalised, Stack, stack
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.defences.conditional_entropy import GatedAttention, KMeans, SlotCross

__all__ = [
    "DEFENCES",
    "Defence",
    "GatedAttention",
    "KMeans",
    "NoiseOnly",
    "Penalised",
    "SlotCross",
    "Stack",
    "find_defence",
    "stack",
]
