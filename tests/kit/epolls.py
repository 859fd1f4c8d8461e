"""What a process polls, as the kernel tells it."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

_ENTRY = re.compile(r"^tfd: +(\d+) .* ino:([0-9a-f]+) ", re.MULTILINE)


def ghosts(pid: int) -> list[str]:
    """Entries of its epolls that are of no use: of a closed descriptor, of another file, double.

    Such an entry stays for as long as some process has the file open, for instance a forked child.
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
    except OSError:  # closed meanwhile
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
    """The processes that it has started and that have not ended."""
    return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
