"""The command `attnmesh`, also as `python -m attnmesh`."""

import sys


def main() -> None:
    """Run the command, or say what it needs: the library itself gets by with PyTorch alone."""
    try:
        from attnmesh.cli import app
    except ModuleNotFoundError as missing:
        sys.exit(f"the attnmesh command needs {missing.name}: pip install 'attnmesh[cli]'")
    app()


if __name__ == "__main__":
    main()
