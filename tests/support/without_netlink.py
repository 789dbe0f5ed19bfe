"""Becomes another program that may not open netlink sockets (Linux).

python without_netlink.py PROGRAM [ARGUMENT ...]

Chromium listens there for the machine's addresses, and ends all its requests with
ERR_NETWORK_CHANGED when one is added or removed: by a test with network namespaces, or by images
that are checked beside the tests. Where it cannot listen it takes the network as it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # codes of the kernel's packet filters
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT
NUMBER_AT, FAMILY_AT = 0, 16  # in struct seccomp_data; the low half of the first argument
SOCKET = {"x86_64": 41, "aarch64": 198}[os.uname().machine]
FILTER = (
    (LOAD, 0, 0, NUMBER_AT),
    (JUMP_IF_EQUAL, 0, 3, SOCKET),
    (LOAD, 0, 0, FAMILY_AT),
    (JUMP_IF_EQUAL, 0, 1, socket.AF_NETLINK),
    (RETURN, 0, 0, REFUSE),
    (RETURN, 0, 0, ALLOW),
)


def main() -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in FILTER))
    program = struct.pack("@HP", len(FILTER), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    none = ctypes.c_ulong(0)
    for option, *arguments in (
        (PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), none),
        (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), program),
    ):
        if libc.prctl(option, *arguments, none, none) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), f"prctl {option}")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
