"""A process with memory that its reader lays out. Prints "ready", then answers each line of stdin.

map BYTES: its address, zeroed; write OFFSET HEX ...: "done"; unmap OFFSET BYTES: "done".
"""

from __future__ import annotations

import ctypes
import mmap
import sys

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = 0
    print("ready", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "map":
            memory = mmap.mmap(-1, int(words[0]))
            # The view keeps the memory alive: it is never given back, so no address is handed out twice.
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            print(address, flush=True)
            continue
        if command == "write":
            for offset, content in zip(words[::2], words[1::2], strict=True):
                memory[int(offset) : int(offset) + len(content) // 2] = bytes.fromhex(content)
        elif libc.munmap(ctypes.c_void_p(address + int(words[0])), ctypes.c_size_t(int(words[1]))):
            raise OSError(ctypes.get_errno(), "munmap")
        print("done", flush=True)


if __name__ == "__main__":
    main()
