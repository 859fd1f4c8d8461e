"""The descriptors that a process polls, according to the kernel."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

_ENTRY = re.compile(r"^tfd: +(\d+) .* ino:([0-9a-f]+) ", re.MULTILINE)


def ghosts(pid: int) -> list[str]:
    """Useless entries of its epolls: for a closed descriptor, for another file, or doubled.

    Such an entry stays for as long as any process has the file open, for instance a forked child.
    """
    return [
        f"epoll {epoll.name}: descriptor {fd} {fault}"
        for epoll in Path(f"/proc/{pid}/fd").iterdir()
        if _target(epoll) == "anon_inode:[eventpoll]"
        for fd, fault in _faults(pid, epoll.name)
    ]


def _faults(pid: int, epoll: str) -> list[tuple[int, str]]:
    try:
        info = Path(f"/proc/{pid}/fdinfo/{epoll}").read_text()
    except OSError:  # closed in the meantime
        return []
    entries = [(int(fd), int(inode, 16)) for fd, inode in _ENTRY.findall(info)]
    count = Counter(fd for fd, _ in entries)
    found = [(fd, "is there twice") for fd in count if count[fd] > 1]
    for fd, inode in entries:
        try:
            if os.stat(f"/proc/{pid}/fd/{fd}").st_ino != inode:
                found.append((fd, "is another file now"))
        except OSError:
            found.append((fd, "is closed"))
    return found


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def children(pid: int) -> set[int]:
    """The processes that it started and that have not ended."""
    return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
