"""Makes and reads run directories, the interface between collection and analysis (docs/reference/run-directory.md)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from itertools import count
from pathlib import Path
from typing import Any, Literal

import ringtap
from ringtap.core.append_only_logs import RecordFile, open_records, read_json_lines
from ringtap.core.errors import UsageError, did_you_mean, file_errors, what_reads
from ringtap.core.json_validation import NS, NewerFormatError, Shape, ShapeError, check, load_json
from ringtap.core.run_directory_schema import NIC_REC, NODE, POINT, RUN, RUN_JSON, SCHEMA, columns_of
from ringtap.core.secret_masking import mask_words
from ringtap.core.terminal_escaping import readable, shell_word
from ringtap.core.untrusted_files import make_folder, new_file_beside, read_whole, replace_file

ACCESS = {"private": 0o700, "group": 0o750, "all": 0o755}
_VISIBLE_S = 60.0  # a network file system shows another machine's new file this late at most, by the usual settings
_MACHINE = ".machine"
_MAX_AGE_NS = 2**60  # 36 years
Status = Literal["running", "complete", "partial", "failed"]


class UnwritableError(UsageError):
    """A run directory is not writable; a job runs nevertheless."""


class TakenError(UsageError):
    """A run directory belongs to another run."""


def _clean(slug: str) -> str:
    return (re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-") or "run")[:40]


def new_name(slug: str) -> str:
    """Return a new folder name for a run: ``<UTC>-<slug>-<6 hex>``."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{_clean(slug)}-{os.urandom(3).hex()}"


def shared_name(slug: str, key: str) -> str:
    """Return the folder name that all ranks of a launched job derive independently: ``<slug>-<run key>``."""
    return f"{_clean(slug)}-{re.sub(r'[^A-Za-z0-9.]+', '-', key).strip('-')}"


def add_access(parser: Any) -> None:
    """Add ``--access`` to a verb that makes run directories."""
    text = "who may enter the run directory, as far as your umask allows: its owner, the group, everybody"
    parser.add_argument("--access", choices=tuple(ACCESS), default="private", help=f"{text} (default: private)")


def _mode(path: Path, access: str) -> int:
    """Return the mode of a new run directory; a run within another one, as a series of a sweep, has its mode."""
    for parent in path.absolute().parents:
        with contextlib.suppress(OSError):
            if (parent / RUN_JSON).is_file():
                return parent.stat().st_mode & 0o777
    return ACCESS[access]


def _json(item: object) -> bytes:
    return (json.dumps(item, indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, item: object) -> None:
    """Write JSON to a temporary name and rename it, so a reader never sees half a file."""
    replace_file(path, _json(item))


def _write_new(path: Path, data: bytes) -> bool:
    """Write a file whose name must not exist yet, whole or not at all; return False if it exists."""
    temporary = new_file_beside(path, data)
    try:
        try:
            os.link(temporary, path)  # atomic, also on NFS and Lustre, and refused where the name is taken
        except FileExistsError:
            with contextlib.suppress(OSError):  # NFS asks again if the first answer is lost: the name may be ours
                return path.samefile(temporary)
            return False
        except OSError:  # a file system without links
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                return False
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return True


def read_json(path: Path, shape: Shape = None) -> Any:
    """Read a JSON file; without a shape it may hold anything.

    Raises:
        UsageError: missing, unreadable, not JSON, or not of the shape.
    """
    try:
        return load_json(path, shape)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ShapeError as error:
        raise UsageError(f"{path} cannot be used: {error}") from error


def read_points(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read points.jsonl or rejected.jsonl; return the windows and the number of torn last lines (0 or 1).

    Raises:
        UsageError: a line, other than a torn last one, is not a window.
    """
    return read_json_lines(path, POINT)


def read_node(path: Path) -> dict[str, Any]:
    """Read a node.json.

    Raises:
        OSError: it cannot be read.
        ShapeError: it is damaged.
    """
    item: dict[str, Any] = load_json(path, NODE)
    return item


def open_log(path: Path) -> RecordFile:
    """Read the header of a record file of a run directory, and check the columns that its name implies.

    Raises:
        OSError: it cannot be read.
        UsageError: not a record file, one of a newer version, or one without these columns.
    """
    return open_records(path, columns_of(path))


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder; files that vanish meanwhile count as they are found."""
    total = 0
    folders = [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    with contextlib.suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def recording_begin(node: Path) -> tuple[int, int] | None:
    """Return CLOCK_REALTIME and CLOCK_MONOTONIC of a node when it began to record its interfaces.

    Where these were not recorded, or not yet, they are those of the earliest record of any log; None without one.

    Args:
        node: the node's folder.
    """
    begin = _first_times(node / NIC_REC)
    return begin or min(filter(None, map(_first_times, node.glob("*/*.rec"))), key=lambda times: times[1], default=None)


def _first_times(path: Path) -> tuple[int, int] | None:
    """Return both times of the first record of a log; None if it has none, or cannot be read, which its readers say."""
    with contextlib.suppress(OSError, UsageError, ShapeError):
        log = open_log(path)
        names = ("end_ns", "end_mono_ns") if "end_mono_ns" in log.index else ("t_ns", "mono_ns")
        if log.count and log.index.keys() >= {*names}:
            row = log.tail(0, 1)[0]
            t_ns, mono_ns = (row[log.index[name]] for name in names)
            check([t_ns, mono_ns], [NS])
            return t_ns, mono_ns
    return None


def clock_gap_ns(node: Path) -> int | None:
    """Return CLOCK_REALTIME minus CLOCK_MONOTONIC of a node at `recording_begin`; None if it is not known.

    Times by CLOCK_MONOTONIC plus this are what CLOCK_REALTIME would have shown if nobody had set it since.

    Args:
        node: the node's folder.
    """
    begin = recording_begin(node)
    return None if begin is None else begin[0] - begin[1]


def process_age_ns(steps: RecordFile) -> int:
    """Return the age of a process at the end of the first record of its step log; 0 if the log does not say."""
    age_ns = steps.about.get("age_ns")
    return age_ns if type(age_ns) is int and 0 <= age_ns < _MAX_AGE_NS else 0


def _nearest_run(path: Path) -> str:
    """Return why a path is not a run directory, and what to name: a run that holds it or is in it, or what reads it."""
    inside = sorted(one.parent for one in path.glob(f"*/{RUN_JSON}")) if path.is_dir() else []
    near = [*(one for one in path.parents if (one / RUN_JSON).is_file()), *inside[::-1]]
    if path.is_dir() or near:
        return "it has no run.json" + (f"; {near[0]} is one" if near else "")
    return "; ".join(filter(None, ["it is a file", what_reads(path.name)]))


class RunDirectory:
    """A run directory on disk; ``info`` is its run.json."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info

    @classmethod
    def create(
        cls,
        path: Path,
        kind: Literal["job", "sweep"],
        argv: list[str],
        seed: int,
        *,
        key: str = "",
        access: str = "private",
        is_shared: bool = False,
        **extra: Any,
    ) -> RunDirectory:
        """Make the folder and its run.json with status ``running``.

        Args:
            path: the folder.
            kind: kind of the run.
            argv: the command line; the values of secret options are masked.
            seed: seed of everything random.
            key: key that the ranks of one launched job share; empty for a single process.
            access: users who may enter a new folder, one of `ACCESS`.
            is_shared: whether other processes may be about to make the same folder.
            **extra: further facts for run.json.

        Raises:
            TakenError: the folder holds a run.
            UsageError: it holds something else, or is a file.
            UnwritableError: it cannot be written.
        """
        info = {
            "schema": SCHEMA,
            "kind": kind,
            "ringtap": ringtap.__version__,
            "argv": mask_words([readable(word) for word in argv]),
        }
        info |= {"created_ns": time.time_ns(), "seed": seed, "status": "running", "why": "", "not_collected": []}
        info |= {"key": key} | extra
        made: list[Path] = []
        try:
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(_mode(path, access), parents=True, exist_ok=True)
            # another process of the job may be about to make it: its temporary file does not count
            found = {entry.name for entry in path.iterdir()}
            strangers = {name for name in found if not (is_shared and name.startswith(f".{RUN_JSON}."))}
            if RUN_JSON in found:
                more = ", or resume with --resume if it is a sweep" if kind == "sweep" else ""
                raise TakenError(f"{path} is not empty: name another folder{more}")
            if strangers:
                raise UsageError(f"{path} is not empty, and no run directory: name another folder")
            if not _write_new(path / RUN_JSON, _json(info)):
                raise TakenError(f"{path} holds a run already: name another folder")
        except (FileExistsError, NotADirectoryError) as error:
            file = next(one for one in (path, *path.parents) if os.path.lexists(one))
            raise UsageError(f"{file} is a file: name a folder") from error
        except OSError as error:
            with contextlib.suppress(OSError):
                for folder in made:  # leave no empty folders behind
                    folder.rmdir()
            raise UnwritableError(f"{path} cannot be written: {error.strerror}") from error
        return cls(path, info)

    @classmethod
    def create_or_join(
        cls, path: Path, argv: list[str], *, key: str, rank: str, job: str = "", is_named: bool = False, **extra: Any
    ) -> tuple[RunDirectory, bool] | None:
        """Make the run directory of a launched job, or join it if another process of the job has made it.

        Args:
            path: the folder all processes agree on.
            argv: the command line.
            key: the key that the processes of one launch share; empty if they have none.
            rank: this process's rank in the launch; each rank of a launch joins a run once.
            job: the batch system's job; empty if there is none.
            is_named: whether the user says that processes without this key belong to the run, too.
            **extra: further facts for run.json, and ``access``.

        Returns:
            The run, and True if this process created it; None if this rank has joined that run before: this is
            another run of the same launch.

        Raises:
            TakenError: the folder belongs to another run.
            UsageError: it holds something else.
            UnwritableError: it cannot be written, or what another process wrote cannot be seen.
        """
        created = True
        try:
            run = cls.create(path, "job", argv, 0, key=key, job=job, is_shared=True, **extra)
        except TakenError:
            try:
                run, created = cls.wait_for(path, _VISIBLE_S), False
            except NewerFormatError:
                raise
            except UsageError as error:
                raise UnwritableError(f"{error}, {_VISIBLE_S:.0f} s after another process made it") from error
            if not is_named and run.info.get("key") != key:
                raise TakenError(
                    f"{path} belongs to another run (its key is {run.info.get('key') or 'none'}, this job's is {key}): "
                    "name another folder with -o"
                ) from None
            run._check_joinable(key, job)
        if key and run.info.get("key") == key:
            try:
                claims = path / ".ranks"
                claims.mkdir(exist_ok=True)
                os.close(os.open(claims / rank, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                return None
            except OSError as error:
                raise UnwritableError(f"{path} cannot be written: {error.strerror}") from error
        return run, created

    @property
    def plan_word(self) -> str:
        """The plan that the command line of a sweep names, quoted for a shell; PLAN.toml if it names none."""
        plans = (word for word in self.info.get("argv") or () if Path(word).suffix == ".toml")
        return shell_word(next(plans, "PLAN.toml"))

    def _check_joinable(self, key: str, job: str) -> None:
        """Check that a process of another launch, or of one without a key, may take part in this run.

        Raises:
            TakenError: the run is a sweep, has ended, or belongs to another job of the batch system.
        """
        info = self.info
        if key and info.get("key") == key:
            return
        why = ""
        if info.get("kind") != "job":
            why = "is a sweep"
        elif info.get("status") != "running":
            why = "holds a run that has ended"
        elif job and info.get("job") and info["job"] != job:
            why = f"belongs to job {info['job']}, and this is job {job}"
        if why:
            raise TakenError(f"{self.path} {why}: name another folder")

    @classmethod
    def wait_for(cls, path: Path, seconds: float) -> RunDirectory:
        """Open a run directory that another process may be about to make.

        Raises:
            UsageError: the directory is still missing or unreadable after ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return cls.open(path)
            except NewerFormatError:
                raise
            except UsageError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run directory.

        Raises:
            UsageError: there is no run.json, its schema is newer, or another user owns it and does not share it.
        """
        try:
            if not path.exists():
                beside = [one.name for one in path.parent.glob("*") if (one / RUN_JSON).is_file()]
                hint = did_you_mean(path.name, beside, str(path).removesuffix(path.name))
                raise UsageError(f"there is no {path}: {hint}give a run directory")
            if not (path / RUN_JSON).is_file():
                raise UsageError(f"{path} is not a run directory: {_nearest_run(path)}")
            info = read_json(path / RUN_JSON)
        except PermissionError as error:
            raise UsageError(f"{path} may not be read by this user: ask its owner for the right to") from error
        if not isinstance(info, dict) or not isinstance(info.get("schema"), int):
            raise UsageError(f"{path / 'run.json'} is not a ringtap run description")
        if info["schema"] > SCHEMA:
            raise NewerFormatError(path, info.get("ringtap"), info["schema"], SCHEMA)
        try:
            check(info, RUN)
        except ShapeError as error:
            raise UsageError(f"{path / 'run.json'} is damaged: {error}") from error
        return cls(path, info)

    def save(self) -> None:
        """Write run.json."""
        write_json(self.path / RUN_JSON, self.info)

    def finish(self, status: Status, why: str = "") -> None:
        """Record the status of the run, and the reason for it."""
        self.info |= {"status": status, "why": why}
        self.save()

    def node(self, host: str) -> Path:
        """Return the folder that a host writes to; create it if missing."""
        path = self.path / "nodes" / host
        make_folder(path)
        return path

    def claim_node(self, name: str, machine: str) -> str:
        """Return the name under which this machine writes: the given one, or ``NAME-2`` if another machine has that.

        Args:
            name: the wanted name.
            machine: what tells this machine from others.

        Raises:
            UnwritableError: nothing can be written there.
        """
        for number in count(1):
            candidate = f"{name}-{number}" if number > 1 else name
            with file_errors(self.path, "cannot be written", UnwritableError):
                path = self.node(candidate) / _MACHINE
                if _write_new(path, machine.encode()) or _read_late(path) == machine.encode():
                    return candidate
        raise AssertionError


def _read_late(path: Path) -> bytes:
    """Read a short file that exists, as soon as the file system shows it and it has been written.

    Raises:
        OSError: it cannot be read even then.
    """
    deadline = time.monotonic() + _VISIBLE_S
    while True:
        try:
            if data := read_whole(path):
                return data
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            return b""
        time.sleep(0.05)
