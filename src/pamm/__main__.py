"""``python -m pamm``."""

from pamm.cli import main

main()
