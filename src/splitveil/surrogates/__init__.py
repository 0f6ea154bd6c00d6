"""Surrogates of the class-conditional entropy H(Z|Y): pure functions, thin modules."""

from splitveil.surrogates.gated_attention import GatedAttentionCEM, GatedAttentionPooling
from splitveil.surrogates.rate import Rate

__all__ = ["GatedAttentionCEM", "GatedAttentionPooling", "Rate"]
