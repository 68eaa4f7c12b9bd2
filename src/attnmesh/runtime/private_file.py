"""Files in folders where other users may make names: a link, a pipe or a file of theirs is not taken for ours."""

import os
from pathlib import Path
from stat import S_IWGRP, S_IWOTH

OTHERS_WRITE = S_IWGRP | S_IWOTH
"""Bits of a mode that let other users write."""


def open_without_links(path: Path) -> int:
    """Return a handle to read a file, no link. A pipe opens at once, where it would wait for a writer."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def is_of_this_user_alone(status: os.stat_result) -> bool:
    """Return whether this user owns a file or folder, and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
