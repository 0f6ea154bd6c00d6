"""What defines a run, and the only place where its names become objects."""

from splitveil.config.run_config import RunConfig

__all__ = ["RunConfig"]
