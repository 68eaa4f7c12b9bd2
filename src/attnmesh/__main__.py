"""The command `attnmesh` as `python -m attnmesh`."""

from attnmesh_command import main as main

if __name__ == "__main__":
    main()
