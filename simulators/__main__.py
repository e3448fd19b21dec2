"""`python -m simulators`."""

from simulators.commands import app

if __name__ == "__main__":
    app()
