"""Modules on their way to other rooms; while they are here, the package answers as `sv.audit`."""

import inspect
import sys
from types import ModuleType

from splitveil.types import Record


class _UntilMoved(ModuleType):
    @property
    def __signature__(self) -> inspect.Signature:
        from splitveil.runs import audit

        return inspect.signature(audit)

    def __call__(self, *args: object, **options: object) -> Record:
        from splitveil.runs import audit

        return audit(*args, **options)  # type: ignore[arg-type]  # whatever `audit` takes


sys.modules[__name__].__class__ = _UntilMoved
