"""``python -m phistate.cli``: the command where its script is not on the path."""

from phistate.cli.main import main

main()
