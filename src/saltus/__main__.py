"""Run the command line as `python -m saltus`, where the script `saltus` is not in the path."""

from saltus.cli import main

main()
