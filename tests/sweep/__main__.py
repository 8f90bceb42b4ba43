"""Write docs/models.md anew: ``python -m tests.sweep`` (some minutes)."""

import multiprocessing

from tests.sweep.check import quiet_outcome
from tests.sweep.page import PAGE, write
from tests.sweep.tiny import KINDS


def main() -> None:
    """Try every type of model, in two processes."""
    results: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    cases = [(kind, name) for kind, names in KINDS.items() for name in sorted(names)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for kind, name, line in pool.imap(quiet_outcome, cases, chunksize=8):
            results[kind][name] = line
            if line.startswith(("FAILED", "not tried")):
                print(kind, name, line)
    write(results)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
