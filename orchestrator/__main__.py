"""`python -m orchestrator`: the same as the command `regate`."""

from orchestrator.cli import main

if __name__ == "__main__":
    main()
