"""Files that are written: by one process at a time, and with errors that name them."""

import errno
import os
import stat
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

Data: TypeAlias = bytes | bytearray | memoryview  # whatever BufferedWriter hands down

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # some file systems have none


class OutputFile(FileIO):
    """Unbuffered.  An error while writing, such as a full disk, carries the file's name."""

    def write(self, data: Data, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.name) from None


def create(path: Path) -> BinaryIO:
    """Open a file for writing, empty.  Raises OSError, also where another process is writing it.

    The lock is the kernel's and ends with the process.  It is taken before the file is emptied, so
    a second writer harms nothing.
    """
    raw = OutputFile(path, "wb", opener=untruncated)
    try:
        if stat.S_ISREG(os.fstat(raw.fileno()).st_mode):  # devices and pipes take anything
            lock(raw, LOCK_EX, path)
            raw.truncate(0)
    except BaseException:
        raw.close()
        raise
    return cast(BinaryIO, BufferedWriter(cast(FileIO, raw)))


def untruncated(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def refuse_busy(path: Path) -> None:
    """Raises OSError where another process is writing the file, or there is none."""
    with FileIO(path) as file:
        lock(file, LOCK_SH, path)


def lock(file: FileIO, kind: int, path: Path) -> None:
    try:
        flock(file.fileno(), kind | LOCK_NB)
    except BlockingIOError as error:
        what = "is being written by another process; name another file"
        raise OSError(error.errno, what, path) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
