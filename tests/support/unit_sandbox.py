"""Runs a command with only the system calls that a systemd unit permits, without systemd.

``python -m tests.support.unit_sandbox UNIT COMMAND…`` applies ``SystemCallFilter=`` and
``MemoryDenyWriteExecute=`` as systemd does, and executes the command. The groups of calls come from
the machine (``systemd-analyze syscall-filter``), the filters from libseccomp.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1
"""libseccomp's SCMP_ACT_ALLOW, and SCMP_ACT_ERRNO with EPERM."""

_MASKED_EQUAL = 7
_SHM_EXEC = 0o100000
_NEVER_BOTH: Mapping[str, tuple[int, int]] = {
    "mmap": (2, mmap.PROT_WRITE | mmap.PROT_EXEC),
    "mprotect": (2, mmap.PROT_EXEC),
    "pkey_mprotect": (2, mmap.PROT_EXEC),
    "shmat": (2, _SHM_EXEC),
}
"""Calls that MemoryDenyWriteExecute refuses if this argument has all these bits."""


class _Condition(ctypes.Structure):
    _fields_ = (("argument", c_uint), ("kind", c_int), ("mask", c_uint64), ("value", c_uint64))


def read_unit(path: Path) -> dict[str, list[str]]:
    """Return the settings of a unit, each with its values in order."""
    sections: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            sections.setdefault(key, []).append(value)
    return sections


@cache
def _calls(group: str) -> frozenset[str]:
    """Return the calls of one of systemd's groups and of its nested groups."""
    shown = subprocess.run(
        ["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True
    ).stdout
    lines = {line.strip() for line in shown.splitlines()[1:]}
    return _expanded(line for line in lines if line and not line.startswith("#"))


def _expanded(names: Iterable[str]) -> frozenset[str]:
    return frozenset().union(*(_calls(name) if name[0] == "@" else {name} for name in names))


def permitted(filters: Sequence[str]) -> frozenset[str]:
    """Return the calls that ``SystemCallFilter=`` lines permit; the first is an allow list."""
    allowed = _calls("@default")
    for pattern in filters:
        names = _expanded(pattern.removeprefix("~").split())
        allowed = allowed - names if pattern.startswith("~") else allowed | names
    return allowed


def restrict(unit: Mapping[str, Sequence[str]]) -> None:
    """Restrict this process and its future child processes."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = c_void_p

    def load(otherwise: int, rules: Mapping[str, tuple[int, int] | None], action: int) -> None:
        context = c_void_p(seccomp.seccomp_init(c_uint32(otherwise)))
        for name, bits in rules.items():
            number = seccomp.seccomp_syscall_resolve_name(name.encode())
            conditions = (
                () if bits is None else (_Condition(bits[0], _MASKED_EQUAL, bits[1], bits[1]),)
            )
            array = (_Condition * len(conditions))(*conditions)
            if number >= 0:  # the call exists on this architecture
                added = seccomp.seccomp_rule_add_array(
                    context, c_uint32(action), number, len(conditions), array
                )
                if added:
                    raise OSError(-added, f"no rule for {name}")
        if failed := seccomp.seccomp_load(context):
            raise OSError(-failed, "the filter is not loaded")

    if unit["MemoryDenyWriteExecute"] == ["yes"]:
        load(_ALLOW, _NEVER_BOTH, _REFUSE)
    load(_REFUSE, dict.fromkeys(permitted(unit["SystemCallFilter"])), _ALLOW)


if __name__ == "__main__":
    restrict(read_unit(Path(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])
