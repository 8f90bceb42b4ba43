"""Optional packages: which extra brings them, and a clear error where they are missing."""

import importlib.util

from pamm.errors import PammError


def require(extra: str, *packages: str) -> None:
    """Raise unless all ``packages`` can be imported; names the extra that installs them.

    Args:
        extra: of this distribution, such as ``"train"``.
        packages: import names.

    Raises:
        PammError: names the missing packages and the command that installs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise PammError(
            f"this needs {', '.join(missing)}, not installed here. "
            f'Install with: pip install "pamm-torch[{extra}]"'
        )
