"""Surrogates of the class-conditional entropy H(Z|Y): pure functions, thin modules."""

from splitveil.surrogates.gated_attention import GatedAttentionCEM, GatedAttentionPooling
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM
from splitveil.surrogates.slots import GatedCrossAttention, SlotAttention

__all__ = [
    "GatedAttentionCEM",
    "GatedAttentionPooling",
    "GatedCrossAttention",
    "KMeansCEM",
    "Rate",
    "SlotAttention",
    "SlotCrossAttentionCEM",
]
