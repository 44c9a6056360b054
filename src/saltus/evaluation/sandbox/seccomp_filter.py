"""The seccomp filter of a confined program: which system calls the Linux kernel lets it make.

Calls in FREE are allowed, some others with certain arguments only (`_conditional_calls`). Calls in DEADLY end the
process. All others fail with ENOSYS, also those of future kernels: for clone3 and openat2, whose arguments a filter
cannot read, libc then falls back to clone and openat. The launcher loads this file by path, so it imports only the
standard library.
"""

import errno
import struct

# name, number on x86-64, number on aarch64; the numbers are those of the kernel's unistd.h. Frequent ones first.
ALLOWED_CALLS = """
futex 202 98, read 0 63, write 1 64, mmap 9 222, munmap 11 215, lseek 8 62, newfstatat 262 79, fstat 5 80, close 3 57,
brk 12 214, clock_nanosleep 230 115, pread64 17 67, mprotect 10 226, getdents64 217 61, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, readv 19 65, writev 20 66, access 21 -, faccessat 269 48,
faccessat2 439 439, pipe 22 -, pipe2 293 59, select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, sched_yield 24 124,
mremap 25 216, dup 32 23, dup2 33 -, dup3 292 24, pause 34 -, nanosleep 35 101, getitimer 36 102, setitimer 38 103,
alarm 37 -, getpid 39 172, getppid 110 173, gettid 186 178, exit 60 93, exit_group 231 94, uname 63 160, getcwd 79 17,
readlink 89 -, readlinkat 267 78, gettimeofday 96 169, time 201 -, getrlimit 97 163, getrusage 98 165, sysinfo 99 179,
times 100 153, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, getpgid 121 155, getpgrp 111 -, getsid 124 156, getpriority 140 141, sigaltstack 131 132,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, statfs 137 43, fstatfs 138 44,
arch_prctl 158 -, set_tid_address 218 96, restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114,
sched_getaffinity 204 123, getcpu 309 168, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, recvfrom 45 207, getsockname 51 204, set_robust_list 273 99,
get_robust_list 274 100, stat 4 -, lstat 6 -, statx 332 291, getrandom 318 278, rseq 334 293, chdir 80 49,
fchdir 81 50, umask 95 166
"""

KILLED_CALLS = """
socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, sendmsg 46 211, fork 57 -,
vfork 58 -, execve 59 221, execveat 322 281, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
process_madvise 440 440, pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424, tkill 200 130,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, creat 85 -, memfd_create 319 279, unlink 87 -, unlinkat 263 35,
rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, link 86 -, linkat 265 37,
symlink 88 -, symlinkat 266 36, mknod 133 -, mknodat 259 33, chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -,
fchown 93 55, lchown 94 -, fchownat 260 54, truncate 76 45, ftruncate 77 46, fallocate 285 47, utime 132 -,
utimes 235 -, utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14,
lremovexattr 198 15, fremovexattr 199 16, mount 165 40, umount2 166 39, move_mount 429 429, fsopen 430 430,
pivot_root 155 41, chroot 161 51, unshare 272 97, setns 308 268, setrlimit 160 164, setpriority 141 140,
sched_setscheduler 144 119, sched_setattr 314 274, sched_setparam 142 118, sched_setaffinity 203 122,
ioprio_set 251 30, setuid 105 146, setgid 106 144, setreuid 113 145, setresuid 117 147, capset 126 91,
io_uring_setup 425 425, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, add_key 248 217,
request_key 249 218, keyctl 250 219, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180, mq_unlink 241 181,
reboot 169 142, init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, swapon 167 224,
swapoff 168 225, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266,
sethostname 170 161, setdomainname 171 162, acct 163 89, quotactl 179 60, syslog 103 116, open_by_handle_at 304 265,
kcmp 312 272
"""

# column above, name of the architecture in the kernel
ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the classic BPF
ALLOW, KILL, RETURN_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_ALLOW, _KILL_PROCESS, _ERRNO
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16  # where struct seccomp_data has them

OPEN_WRITE_FLAGS = 0o3 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
CLONE_THREAD, CLONE_NAMESPACES = 0x00010000, 0x7E020000  # CLONE_THREAD; CLONE_NEWNS, _NEWUSER, _NEWNET …
# TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIO…
ALLOWED_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: no locks, no owners
ALLOWED_FCNTLS = (0, 1, 2, 3, 4, 1030)
ALLOWED_PRCTLS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
FIRST_HARDWARE_MADVISE = 100  # MADV_HWPOISON and MADV_SOFT_OFFLINE would take memory away from the whole machine


def build_filter(machine: str, pid: int) -> bytes | None:
    """The filter for process `pid` as an array of struct sock_filter; None for a machine that is not listed."""
    if machine not in ARCHITECTURES:
        return None
    column, architecture = ARCHITECTURES[machine]
    steps = [
        _instruction(LOAD, ARCHITECTURE_OFFSET),
        _instruction(EQUAL, architecture, skip_if_true=1),  # 32-bit calls have other numbers
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER_OFFSET),
    ]
    for number in _call_numbers(ALLOWED_CALLS, column):
        steps += _match_call(number, [_instruction(RETURN, ALLOW)])
    for text, body in _conditional_calls(pid).items():
        for number in _call_numbers(text, column):
            steps += _match_call(number, body)
    for number in _call_numbers(KILLED_CALLS, column):
        steps += _match_call(number, [_instruction(RETURN, KILL)])
    return b"".join([*steps, _instruction(RETURN, RETURN_ERRNO | errno.ENOSYS)])


def _conditional_calls(pid: int) -> dict[str, list[bytes]]:
    """Calls that are allowed with certain arguments."""
    only_itself = _allow_only_values(0, (pid,), KILL)
    return {
        "open 2 -": _kill_if_any_bit(1, OPEN_WRITE_FLAGS),
        "openat 257 56": _kill_if_any_bit(2, OPEN_WRITE_FLAGS),
        "ioctl 16 29": _allow_only_values(1, ALLOWED_IOCTLS, RETURN_ERRNO | errno.ENOTTY),
        "fcntl 72 25": _allow_only_values(1, ALLOWED_FCNTLS, RETURN_ERRNO | errno.EPERM),
        "prctl 157 167": _allow_only_values(0, ALLOWED_PRCTLS, RETURN_ERRNO | errno.EPERM),
        "kill 62 129": only_itself,
        "tgkill 234 131": only_itself,
        "prlimit64 302 261": _kill_unless_null(2),  # asking is free, setting is not
        "sendto 44 206": _kill_unless_null(4),  # over a pair, to nobody else
        "socketpair 53 199": _allow_only_values(0, (1,), KILL),  # AF_UNIX, with which asyncio wakes itself
        "madvise 28 233": [
            _load_argument(2),
            _instruction(AT_LEAST, FIRST_HARDWARE_MADVISE, skip_if_false=1),
            _instruction(RETURN, KILL),
            _instruction(RETURN, ALLOW),
        ],
        "clone 56 220": [
            _load_argument(0),
            _instruction(ANY_BIT, CLONE_NAMESPACES, skip_if_true=1),
            _instruction(ANY_BIT, CLONE_THREAD, skip_if_true=1),
            _instruction(RETURN, KILL),
            _instruction(RETURN, ALLOW),
        ],
    }


def _call_numbers(text: str, column: int) -> list[int]:
    words = (line.split()[column] for line in text.split(","))
    return [int(word) for word in words if word != "-"]


def _instruction(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    """One struct sock_filter; a comparison skips so many instructions if it is true or false."""
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)


def _match_call(number: int, body: list[bytes]) -> list[bytes]:
    """Run `body`, which must return, for the call of that number; the number stays loaded for others."""
    return [_instruction(EQUAL, number, skip_if_false=len(body)), *body]


def _load_argument(index: int, high: bool = False) -> bytes:
    """Load one half of a 64-bit argument; both machines are little-endian."""
    return _instruction(LOAD, ARGUMENTS_OFFSET + 8 * index + 4 * high)


def _allow_only_values(index: int, values: tuple[int, ...], otherwise: int) -> list[bytes]:
    allowed = [_instruction(EQUAL, value, skip_if_true=len(values) - place) for place, value in enumerate(values)]
    return [_load_argument(index), *allowed, _instruction(RETURN, otherwise), _instruction(RETURN, ALLOW)]


def _kill_if_any_bit(index: int, bits: int) -> list[bytes]:
    return [
        _load_argument(index),
        _instruction(ANY_BIT, bits, skip_if_false=1),
        _instruction(RETURN, KILL),
        _instruction(RETURN, ALLOW),
    ]


def _kill_unless_null(index: int) -> list[bytes]:
    halves = [
        _load_argument(index),
        _instruction(EQUAL, 0, skip_if_false=2),
        _load_argument(index, high=True),
        _instruction(EQUAL, 0, skip_if_true=1),
    ]
    return [*halves, _instruction(RETURN, KILL), _instruction(RETURN, ALLOW)]
