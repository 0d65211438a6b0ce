"""A /proc made of files, for what reads the real one."""

from __future__ import annotations

from pathlib import Path


class FakeProc:
    """A /proc with as much in it as is read."""

    def __init__(self, root: Path) -> None:
        self.root = root / "proc"
        self.root.mkdir()

    def add_thread(self, pid: int, tid: int, seccomp: int = 0) -> None:
        directory = self.root / str(pid) / "task" / str(tid)
        directory.mkdir(parents=True)
        (directory / "status").write_text(
            f"Tgid:\t{pid}\nPid:\t{tid}\nSeccomp:\t{seccomp}\nSeccomp_filters:\t9\n"
        )

    def add(
        self, pid: int, maps: str = "", name: str = "python", leader: int | None = None, parent: int = 1
    ) -> Path:
        directory = self.root / str(pid)
        (directory / "map_files").mkdir(parents=True)
        self.add_thread(pid, pid)
        (directory / "root").mkdir()
        (directory / "maps").write_text(maps)
        (directory / "status").write_text(f"Name:\t{name}\nTgid:\t{leader or pid}\nPid:\t{pid}\n")
        self.set_stat(pid, name=name, parent=parent)
        (directory / "exe").symlink_to("/usr/bin/python3")
        return directory

    def set_stat(self, pid: int, name: str = "python", parent: int = 1, **fields: int) -> None:
        """Writes stat, in which each field that is not given has its own number, from 1 on, as proc(5) counts them."""
        numbers = {"start": 22, "size": 23, "stack": 28}
        values = [*range(53)]
        values[4] = parent
        for field, value in fields.items():
            values[numbers[field]] = value
        rest = " ".join(str(value) for value in values[4:])
        (self.root / str(pid) / "stat").write_text(f"{pid} ({name}) S {rest}\n")
