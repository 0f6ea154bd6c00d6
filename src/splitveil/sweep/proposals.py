"""Which settings a trial has: by grid, at random, or as Optuna suggests; always by seed.

Grid and random proposals are functions of the plan. Optuna's also depend on the trials that were
finished before; each is asked of a fresh sampler with a seed of its own, so that a sweep that was
killed goes on as if it had not been.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from splitveil.errors import ConfigError
from splitveil.rng import derive_seed
from splitveil.sweep.space import Choices, Dimension, Range, Settings, Space, draw, grid, grid_size
from splitveil.sweep.trial import Plan, Task

STARTUP = 10  # Optuna's trials at random before it models anything, or a third of the budget


@dataclass(frozen=True, kw_only=True)
class Past:
    """A finished trial as a sampler sees it; `values` is accuracy and leakage, None: it failed."""

    settings: Mapping[str, Any]
    values: tuple[float, float] | None


def default_trials(spaces: Mapping[str, Space]) -> int:
    """Trials of a defence when a grid is not told: those of the largest grid."""
    return max(grid_size(space) for space in spaces.values())


def fixed(plan: Plan, defence: str, space: Space) -> Iterator[Settings]:
    """The settings of every trial of a defence, by a sampler that does not learn."""
    name = f"sweep/{defence}"
    if plan.sampler == "random":
        for number in range(plan.trials):
            yield draw(space, Random(derive_seed(plan.seed, f"{name}/{number}")))  # noqa: S311
        return
    points = grid(space)
    if plan.trials < len(points):
        Random(derive_seed(plan.seed, name)).shuffle(points)  # noqa: S311 - no secret
    for number in range(plan.trials):
        yield points[number % len(points)]


def learned(plan: Plan, defence: str, number: int, space: Space, past: Sequence[Past]) -> Settings:
    """The settings of trial `number` of a defence, by the sampler that learns."""
    startup = min(STARTUP, max(1, plan.trials // 3))
    return _ask(space, past, derive_seed(plan.seed, f"sweep/{defence}/{number}") % 2**32, startup)


def task(plan: Plan, defence: str, number: int, settings: Settings, used: Container[int]) -> Task:
    """The trial with these settings; `used` are the seeds of others of the defence that have them.

    So the budget of a defence with few settings goes into seeds, and no trial is another's twin.
    """
    seed = int(settings.get("seed", plan.seed))
    while seed in used:
        seed += 1
    return Task(defence=defence, number=number, settings=settings, seed=seed)


def alike(settings: Mapping[str, Any]) -> str:
    """The same text for settings that differ in nothing but their seed.

    >>> alike({"lambd": 0.1, "seed": 3}) == alike({"lambd": 0.1})
    True
    """
    return repr(sorted((k, v) for k, v in settings.items() if k != "seed"))


def need_optuna() -> None:
    """Refuse early where Optuna is missing."""
    try:
        import optuna as optuna  # noqa: PLC0414 - only whether it is there
    except ImportError as err:
        raise ConfigError(
            "--sampler optuna needs Optuna, which is not installed; "
            "pip install 'splitveil[sweep]', or use --sampler random"
        ) from err


def _ask(space: Space, past: Sequence[Past], seed: int, startup: int) -> Settings:
    """Optuna's next point (multi-objective TPE): accuracy up, leakage down."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=["maximize", "minimize"],
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup),
    )
    kinds = {d.key: _distribution(d) for d in space}
    states = optuna.trial.TrialState
    for one in past:
        study.add_trial(
            optuna.trial.create_trial(
                state=states.FAIL if one.values is None else states.COMPLETE,
                params={d.key: _encoded(d, one.settings[d.key]) for d in space},
                distributions=kinds,
                values=one.values,
            )
        )
    asked = study.ask(kinds).params
    return {d.key: _decoded(d, asked[d.key]) for d in space}


def _distribution(dimension: Dimension) -> Any:  # noqa: ANN401 - Optuna is imported only if used
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(dimension, Choices):
        return CategoricalDistribution(tuple(range(len(dimension.values))))
    low, high = dimension.low, dimension.high
    if dimension.whole:
        return IntDistribution(int(low), int(high), log=dimension.log)
    return FloatDistribution(low, high, log=dimension.log)


def _encoded(dimension: Dimension, value: Any) -> Any:  # noqa: ANN401 - a value of any field
    return value if isinstance(dimension, Range) else dimension.values.index(value)


def _decoded(dimension: Dimension, value: Any) -> Any:  # noqa: ANN401 - a value of any field
    return value if isinstance(dimension, Range) else dimension.values[value]
