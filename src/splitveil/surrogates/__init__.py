"""Surrogates of the class-conditional entropy H(Z|Y): pure functions, thin modules."""

from splitveil.surrogates.gated_attention import GatedAttentionCEM, GatedAttentionPooling
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

__all__ = [
    "GatedAttentionCEM",
    "GatedAttentionPooling",
    "KMeansCEM",
    "Rate",
    "SlotCrossAttentionCEM",
]
