"""What can go wrong between the halves, as errors a user can mend.

ExportError  an exported folder that is absent, broken, or not what its manifest says
WireError    bytes that are not a valid request or answer; carries the HTTP status to reply with
ServerError  a server that cannot be reached, is too busy for too long, or refuses
"""

from splitveil.errors import SplitVeilError

BAD_REQUEST = 400


class ExportError(SplitVeilError):
    """An exported folder that is absent, broken, or not what its manifest says."""


class WireError(SplitVeilError):
    """Bytes that are not a valid request or answer."""

    def __init__(self, reason: str, status: int = BAD_REQUEST) -> None:
        super().__init__(reason)
        self.status = status


class ServerError(SplitVeilError):
    """A server that cannot be reached, is too busy for too long, or refuses."""
