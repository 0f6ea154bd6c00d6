"""Profiles: the budgets of an audit, from `smoke` to `paper`.

The decoder comes in three sizes, small N4C32, base N8C64 and large N12C128, and the base with
three losses; under `paper` all five follow one schedule, under `standard` the small one and the
perceptual one half of it. `quick` has smaller nets for two CPU cores and no `decoder-large`;
`smoke` only shows that every attack runs, and fits for as many steps whatever the number of images.
`rmle` and `prior` are expensive and run on a fixed subset, the larger the smaller the images are;
`gan`, the CEM paper's, belongs to `paper`; `k-query` sees several draws of each image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from splitveil.attacks.attribute import AttributeHead
from splitveil.attacks.base import count_for
from splitveil.attacks.baseline import ClassMean, MeanImage, Nearest
from splitveil.attacks.decoder import Decoder, with_compiled_decoders
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.membership import Membership
from splitveil.attacks.prior import Prior
from splitveil.attacks.reid import ReId
from splitveil.attacks.rmle import ImageSearch, Rmle
from splitveil.attacks.wgan import Wgan
from splitveil.errors import ConfigError, unknown
from splitveil.threat import Attack

_CHEAP: Mapping[str, Attack] = {
    "mean": MeanImage(),
    "class-mean": ClassMean(),
    "nearest": Nearest(),
    "linear": Linear(),
}


def _decoders(
    base: Decoder, *, small: Decoder, large: Decoder | None, feature_steps: int
) -> dict[str, Attack]:
    """The ladder of sizes, and the base with its other losses."""
    sizes = {"decoder-small": replace(small, effort=5.0), "decoder": base}
    if large is not None:
        sizes["decoder-large"] = replace(large, effort=20.0)
    features = replace(base, loss="perceptual", feature_steps=feature_steps, effort=15.0)
    return {**sizes, "decoder-ssim": replace(base, loss="ssim"), "decoder-perceptual": features}


def _full_size(base: Decoder, brief: Decoder) -> dict[str, Attack]:
    """N4C32, N8C64 and N12C128; the smallest and the perceptual one have the brief schedule."""
    small, large = replace(brief, blocks=4, width=32), replace(base, blocks=12, width=128)
    sizes = _decoders(base, small=small, large=large, feature_steps=1000)
    features = replace(brief, loss="perceptual", feature_steps=1000, effort=15.0)
    return sizes | {"decoder-perceptual": features}


_TINY = Decoder(width=16, blocks=1, epochs=0, min_steps=60, batch_size=32, lr=1e-2)
_QUICK = Decoder(blocks=2, epochs=1, min_steps=600, batch_size=64, lr=8e-3)
_STANDARD = Decoder(epochs=16, min_steps=3000)
_PAPER = Decoder(epochs=50, lr=1e-3, weight_decay=1e-4, schedule="cosine", min_steps=3000)

PROFILES: Mapping[str, Mapping[str, Attack]] = {
    "smoke": {
        **_CHEAP,
        **_decoders(
            _TINY, small=replace(_TINY, width=8), large=replace(_TINY, width=24), feature_steps=20
        ),
        "decoder": Decoder(width=16, blocks=1, epochs=0, min_steps=100, batch_size=64),
        "rmle": Rmle(start=_TINY, steps=20, restarts=0, chunk=32, limit=32, most=32),
        "prior": Prior(
            start=_TINY, factors=16, steps=15, refine=5, restarts=0, chunk=32, limit=32, most=32
        ),
        "gan": Wgan(start=_TINY, width=8, epochs=0, min_steps=20, batch_size=32),
        "k-query": KQuery(repeats=4, inner=_TINY),
    },
    "quick": {
        **_CHEAP,
        **_decoders(
            _QUICK, small=replace(_QUICK, blocks=1, width=32), large=None, feature_steps=200
        ),
        "rmle": Rmle(start=_QUICK, steps=150, chunk=64, limit=64),
        "prior": Prior(start=_QUICK, factors=64, steps=100, refine=60, chunk=64, limit=64),
        "k-query": KQuery(repeats=16, inner=replace(_QUICK, width=32, min_steps=300)),
    },
    "standard": {
        **_CHEAP,
        **_full_size(_STANDARD, replace(_STANDARD, epochs=8, min_steps=1500)),
        "rmle": Rmle(start=replace(_STANDARD, epochs=4, min_steps=750)),
        "prior": Prior(start=replace(_STANDARD, epochs=4, min_steps=750), net_steps=1000),
        "k-query": KQuery(repeats=16, inner=replace(_STANDARD, epochs=4, min_steps=750)),
    },
    "paper": {
        **_CHEAP,
        **_full_size(_PAPER, _PAPER),
        "rmle": Rmle(start=_STANDARD, steps=1000, restarts=3),
        "prior": Prior(
            start=_STANDARD, factors=256, net_steps=5000, steps=500, refine=500, restarts=3
        ),
        "gan": Wgan(start=_PAPER),
        "k-query": KQuery(repeats=16, inner=_PAPER),
    },
}


def scale_search_budgets(
    attacks: Mapping[str, Attack], values: int, scored: int
) -> dict[str, Attack]:
    """The attacks for `scored` images of `values` numbers: searches take about as long for any.

    They take more images where these are small, all of them if they can, and are then ranked.
    """

    def fitting(attack: Attack) -> Attack:
        if not isinstance(attack, ImageSearch):
            return attack
        limit = min(count_for(attack.limit, values), attack.most, scored)
        return replace(attack, limit=limit, chunk=min(count_for(attack.chunk, values), limit))

    return {name: fitting(attack) for name, attack in attacks.items()}


@dataclass(frozen=True, kw_only=True)
class LeakBudget:
    """The budget of each attack on more than pixels."""

    attribute: AttributeHead
    membership: Membership
    reid: ReId


_FULL = LeakBudget(
    attribute=AttributeHead(epochs=8, min_steps=1500, batch_size=256),
    membership=Membership(draws=8, limit=10000, min_steps=1500),
    reid=ReId(),
)

LEAK_BUDGETS: Mapping[str, LeakBudget] = {
    "smoke": LeakBudget(
        attribute=AttributeHead(epochs=0, min_steps=40, batch_size=32),
        membership=Membership(draws=2, references=1, limit=200, min_steps=40, batch_size=32),
        reid=ReId(draws=8, limit=200, tried=100),
    ),
    "quick": LeakBudget(
        attribute=AttributeHead(epochs=1, min_steps=300, batch_size=64),
        membership=Membership(limit=1000, min_steps=300, batch_size=64),
        reid=ReId(draws=16, limit=2000),
    ),
    "standard": _FULL,
    "paper": _FULL,
}

FLOORS = ("mean", "class-mean")  # every audit has them: they cost nothing


def find_profile(
    name: str, *, only: Sequence[str] = (), compile: bool = False
) -> Mapping[str, Attack]:
    """The attacks of this profile with their budgets.

    `only` some of them, and the floors; `compile`: with compiled decoders.
    """
    if name not in PROFILES:
        raise ConfigError(unknown("profile", name, PROFILES))
    for wanted in only:
        if wanted not in PROFILES[name]:
            raise ConfigError(unknown(f"attack of profile '{name}'", wanted, PROFILES[name]))
    attacks = {k: v for k, v in PROFILES[name].items() if not only or k in (*only, *FLOORS)}
    return (
        {key: with_compiled_decoders(attack) for key, attack in attacks.items()}
        if compile
        else attacks
    )
