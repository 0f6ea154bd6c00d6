"""Profiles: the budgets of an audit, from `smoke` to `paper`, each stronger than the one before.

The decoder has three sizes (small N4C32, base N8C64, large N12C128), and the base has three losses.
Under `paper` all five have the same schedule; under `standard` the small and the perceptual one
have half of it. `quick` and `laptop` are for two CPU cores: they have one network that works at the
wire's resolution, and no `decoder-large`, the same for every defence. That of `quick` was chosen on
digits by its error in equal time on three clients (no defence, noise, `veil`; one seed); from a
larger aux set it takes more steps, up to a limit that keeps it quick. That of `laptop` has the
lowest mean error of four in equal time on three clients of CIFAR-10. `demo` has the decoder of
`quick` and the attacks that cost nothing, so that the demo takes two minutes. `smoke` only shows
that every attack runs: its fits take the same steps for any number of images. `rmle` and `prior`
are expensive and run on a fixed subset, which is larger for smaller images. `gan`, from the CEM
paper, belongs to `paper` (and to `smoke`, as everything does). `k-query` sees several sendings of
each image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from splitveil.attacks.arithmetic import Arithmetic
from splitveil.attacks.attribute import AttributeHead
from splitveil.attacks.baseline import ClassMean, MeanImage, Nearest
from splitveil.attacks.decoder import Decoder, with_decoders
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.membership import Membership
from splitveil.attacks.prior import Prior
from splitveil.attacks.reid import ReId
from splitveil.attacks.rmle import Rmle
from splitveil.attacks.wgan import Wgan
from splitveil.cuda import Precision
from splitveil.errors import ConfigError, unknown
from splitveil.threat import Attack

_CHEAP: Mapping[str, Attack] = {
    "mean": MeanImage(),
    "class-mean": ClassMean(),
    "nearest": Nearest(),
    "linear": Linear(),
}


def _decoders(
    base: Decoder,
    *,
    small: Decoder,
    perceptual: Decoder,
    large: Decoder | None = None,
    more: int = 0,
) -> dict[str, Attack]:
    """The decoder in several sizes, and the base with the two other losses.

    With `more` these continue the base for so many steps.
    """
    sizes = {"decoder-small": replace(small, effort=5.0), "decoder": base}
    if large is not None:
        sizes["decoder-large"] = replace(large, effort=20.0)
    features = replace(perceptual, loss="perceptual", more=more, effort=15.0)
    structure = replace(base, loss="ssim", more=more)
    return {**sizes, "decoder-ssim": structure, "decoder-perceptual": features}


def _full_size(base: Decoder, brief: Decoder) -> dict[str, Attack]:
    """N4C32, N8C64 and N12C128; the smallest and the perceptual one have the brief schedule."""
    small, large = replace(brief, blocks=4, width=32), replace(base, blocks=12, width=128)
    return _decoders(base, small=small, large=large, perceptual=brief)


_TINY = Decoder(width=16, blocks=1, epochs=0, min_steps=60, batch_size=32, lr=1e-2)
_QUICK = Decoder(
    net="shuffle", blocks=2, epochs=8, min_steps=400, max_steps=1000, batch_size=64, lr=8e-3
)
_LAPTOP = Decoder(
    net="shuffle", width=64, blocks=2, epochs=8, min_steps=3000, batch_size=128, lr=4e-3
)
_STANDARD = Decoder(epochs=16, min_steps=3000)
_PAPER = Decoder(epochs=50, lr=1e-3, weight_decay=1e-4, schedule="cosine", min_steps=3000)

PROFILES: Mapping[str, Mapping[str, Attack]] = {
    "smoke": {
        **_CHEAP,
        **_decoders(
            _TINY,
            small=replace(_TINY, width=8),
            large=replace(_TINY, width=24),
            perceptual=replace(_TINY, feature_steps=20),
        ),
        "decoder": Decoder(width=16, blocks=1, epochs=0, min_steps=100, batch_size=64),
        "rmle": Rmle(start=_TINY, steps=20, restarts=0, chunk=32, limit=32, most=32),
        "prior": Prior(
            start=_TINY, factors=16, steps=15, refine=5, restarts=0, chunk=32, limit=32, most=32
        ),
        "gan": Wgan(start=_TINY, width=8, epochs=0, min_steps=20, batch_size=32),
        "k-query": KQuery(repeats=4, inner=_TINY),
    },
    "demo": {**_CHEAP, "decoder": replace(_QUICK, epochs=1, min_steps=300, max_steps=None)},
    "quick": {
        **_CHEAP,
        **_decoders(
            _QUICK,
            small=replace(_QUICK, blocks=1, width=32),
            perceptual=replace(_QUICK, feature_steps=200),
            more=200,
        ),
        "rmle": Rmle(start=_QUICK, steps=80, chunk=64, limit=64),
        "prior": Prior(start=_QUICK, factors=64, steps=50, refine=40, chunk=64, limit=64),
        "k-query": KQuery(repeats=16, inner=replace(_QUICK, width=32, min_steps=300)),
    },
    "laptop": {
        **_CHEAP,
        "decoder": _LAPTOP,
        "decoder-ssim": replace(_LAPTOP, loss="ssim", more=800),
        "rmle": Rmle(start=replace(_LAPTOP, epochs=2, min_steps=1200), chunk=64, limit=64),
        "prior": Prior(
            start=replace(_LAPTOP, epochs=2, min_steps=1200),
            steps=100,
            refine=100,
            chunk=64,
            limit=64,
        ),
        "k-query": KQuery(repeats=16, inner=replace(_LAPTOP, epochs=2, min_steps=1200)),
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


@dataclass(frozen=True, kw_only=True)
class LeakBudget:
    """The attacks on other secrets than pixels, with their budgets."""

    attribute: AttributeHead
    membership: Membership
    reid: ReId
    arithmetic: Arithmetic = Arithmetic()  # noqa: RUF009 - it is frozen


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
        arithmetic=Arithmetic(limit=200, tried=100),
    ),
    "demo": LeakBudget(
        attribute=AttributeHead(epochs=0, min_steps=100, batch_size=64),
        membership=Membership(draws=2, references=1, limit=500, min_steps=100, batch_size=64),
        reid=ReId(draws=8, limit=500, tried=100),
        arithmetic=Arithmetic(limit=500, tried=100),
    ),
    "quick": LeakBudget(
        attribute=AttributeHead(epochs=1, min_steps=300, batch_size=64),
        membership=Membership(limit=1000, min_steps=300, batch_size=64),
        reid=ReId(draws=16, limit=2000),
    ),
    "laptop": LeakBudget(
        attribute=AttributeHead(epochs=2, min_steps=600, batch_size=128),
        membership=Membership(limit=2000, min_steps=600, batch_size=128),
        reid=ReId(draws=16, limit=2000),
    ),
    "standard": _FULL,
    "paper": _FULL,
}

# Counts the changes after which an attack of some profile may find something else. A record without
# this number is of version 1.
ATTACKS_VERSION = 3

FLOORS = ("mean", "class-mean")  # part of every audit: they cost nothing


def at_precision(attacks: Mapping[str, Attack], precision: Precision) -> dict[str, Attack]:
    """The attacks with their decoders fitted in this precision."""
    return {name: with_decoders(attack, precision=precision) for name, attack in attacks.items()}


def find_profile(
    name: str, *, only: Sequence[str] = (), compile: bool = False
) -> Mapping[str, Attack]:
    """The attacks of a profile with their budgets.

    Args:
        name: smoke, demo, quick, laptop, standard or paper.
        only: Names of some of its attacks; default all. The floors are always there.
        compile: Whether torch compiles the decoders on a GPU.

    >>> list(find_profile("smoke", only=["linear"]))
    ['mean', 'class-mean', 'linear']
    """
    if name not in PROFILES:
        raise ConfigError(unknown("profile", name, PROFILES))
    for wanted in only:
        if wanted not in PROFILES[name]:
            raise ConfigError(unknown(f"attack of profile '{name}'", wanted, PROFILES[name]))
    attacks = {k: v for k, v in PROFILES[name].items() if not only or k in (*only, *FLOORS)}
    return {k: with_decoders(v, fused=True) for k, v in attacks.items()} if compile else attacks
