"""`python -m simulators.children KIND`."""

import typer

from simulators.children.commands import child

if __name__ == "__main__":
    typer.run(child)
