"""The command `attnmesh`, also as `python -m attnmesh`."""

import sys


def main() -> None:
    """Run the command, or say what it needs: the library itself gets by with PyTorch alone."""
    try:
        from attnmesh.cli.app import app
        from attnmesh.cli.generate import show_errors
    except ModuleNotFoundError as missing:
        sys.exit(f"the attnmesh command needs {missing.name}: pip install 'attnmesh[cli]'")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    sys.exit(show_errors(app, verbose=bool({"-v", "--verbose"} & {*sys.argv})))


if __name__ == "__main__":
    main()
