"""What defines a run, and the only place where its names become objects."""

from splitveil.attacks.profiles import find_profile
from splitveil.config.resolve import (
    Built,
    Parts,
    Plan,
    build_defence,
    find_device,
    flat_config,
    make_config,
    plan_of,
    planned_steps,
)
from splitveil.config.run_config import ANY_RECIPE, RECIPES, RUN_KEYS, RunConfig, one_noise_name
from splitveil.defences.catalogue import find_defence
from splitveil.nets.catalogue import find_net

__all__ = [
    "ANY_RECIPE",
    "RECIPES",
    "RUN_KEYS",
    "Built",
    "Parts",
    "Plan",
    "RunConfig",
    "build_defence",
    "find_defence",
    "find_device",
    "find_net",
    "find_profile",
    "flat_config",
    "make_config",
    "one_noise_name",
    "plan_of",
    "planned_steps",
]
