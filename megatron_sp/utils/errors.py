"""Every failure a user can meet, with the exit code that scripts and schedulers act on.

A ``ReportedError`` is a complete message for the user: what is wrong, the values, the rule and the way out. The entry
points print it without a traceback and exit with its code; any other exception is a bug of ours and keeps its traceback.
torchrun turns every code into 1, so the code is also written to ``run_status.json`` of the run.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_CHECKPOINT = 3
EXIT_DATA = 4
EXIT_NUMERICS = 5
EXIT_DISK = 6
EXIT_PEER = 7
EXIT_LOCK = 8
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: everything is saved, start the same command again
EXIT_INTERRUPTED = 130  # by Ctrl-C, of a program that keeps nothing half done


class ReportedError(Exception):
    """A failure that is explained by its message alone; ``exit_code`` says which kind it is.

    ``on_all_ranks``: every rank raises it, so rank 0 alone says it; set it to False on an error that one rank has met on its own.
    """

    exit_code = 1
    on_all_ranks = True


class ConfigError(ReportedError, ValueError):
    """A flag, or a combination of flags, that cannot work."""

    exit_code = EXIT_CONFIG


class CheckpointError(ReportedError):
    """A checkpoint that is absent, incomplete, damaged, or of another model."""

    exit_code = EXIT_CHECKPOINT


class DataError(ReportedError):
    """A data set or tokenizer that is absent, damaged, or does not fit the model."""

    exit_code = EXIT_DATA


class NumericsError(ReportedError):
    """Too many non-finite steps in a row."""

    exit_code = EXIT_NUMERICS


class DiskError(ReportedError):
    """No space, or no permission, where the run must write."""

    exit_code = EXIT_DISK


class PeerError(ReportedError):
    """Another rank died, or did not answer in time."""

    exit_code = EXIT_PEER
    on_all_ranks = False


class LockError(ReportedError):
    """Another process is writing into the same run."""

    exit_code = EXIT_LOCK
