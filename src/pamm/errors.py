"""The errors a user can meet; each says what was given, what is allowed, what to do."""


class PammError(ValueError):
    """Anything pamm refuses: a bad argument, an unreadable file, a run that cannot go on."""


class NothingToConvertError(PammError):
    """No group of projections was found, so training would go on exactly as before."""


class PartialGroupError(PammError):
    """Some, but not all, readers of one input were selected; that frees no memory."""


def said(error: Exception) -> str:
    """What an error of another library says, to be quoted: in one line, without a full stop."""
    return " ".join(str(error).split())[:300].rstrip(".")


class ArmFailedError(RuntimeError):
    """The process of one training of a run ended with an error, which it has shown itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
