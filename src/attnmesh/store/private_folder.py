"""Folders of this user alone: prompts can be read in keys and tokens."""

import os
from contextlib import suppress
from pathlib import Path

from attnmesh.errors import StoreError
from attnmesh.runtime.private_file import is_of_this_user_alone
from attnmesh.store.locks import lock_for_cache

PRIVATE_FOLDER = 0o700
"""Mode of a folder of this user alone."""


def make_folders(folder: Path) -> None:
    """Make a folder if it is missing, and those that it is in, each for its owner alone."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)  # it may have been made meanwhile


def check_private(subject: str, folder: Path) -> None:
    """Raise unless this user alone may write to a folder."""
    status = folder.stat()
    if not folder.is_dir():
        raise StoreError(subject, "a folder", f"{folder}, a file", "pass another path")
    if not is_of_this_user_alone(status):
        is_own = status.st_uid == os.geteuid()
        given = f"{folder}, which others can write to" if is_own else f"{folder}, which is another's"
        fix = f"run chmod go-w {folder}, or take a folder of your own"
        raise StoreError(subject, "a folder that no other user may write to", given, fix)


def make_private(subject: str, folder: Path) -> None:
    """Make a folder if it is missing. Raise unless this user alone may write to it."""
    with suppress(FileExistsError):
        make_folders(folder)
    check_private(subject, folder)


def lock_private_folder(subject: str, folder: Path) -> int:
    """Make a folder of this user alone if it is missing. Return a handle that locks it against other caches."""
    make_private(subject, folder)
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_for_cache(handle, folder)
    except BaseException:
        os.close(handle)
        raise
    return handle
