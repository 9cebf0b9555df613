"""Errors reported to users, with the exit codes that scripts and schedulers rely on.

A ``ReportedError`` has a complete message for the user: what is wrong, the values, the rule and a remedy. The entry
points print it without a traceback and exit with its code; any other exception is a bug of ours and keeps its
traceback. torchrun turns every code into 1, so the code is also written to ``run_status.json`` of the run.
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
EXIT_INTERRUPTED = 130  # ended by Ctrl-C, with nothing left half done


class ReportedError(Exception):
    """A failure that its message fully explains; ``exit_code`` identifies its kind.

    ``on_all_ranks``: every rank raises it, so only rank 0 prints it; set it to False for an error that only one rank
    raises.
    """

    exit_code = 1
    on_all_ranks = True


class ConfigError(ReportedError, ValueError):
    """A flag, or a combination of flags, that cannot work."""

    exit_code = EXIT_CONFIG


class CheckpointError(ReportedError):
    """A checkpoint that is missing, incomplete, damaged, or of another model."""

    exit_code = EXIT_CHECKPOINT


class DataError(ReportedError):
    """A data set or tokenizer that is missing, damaged, or does not fit the model."""

    exit_code = EXIT_DATA


class NumericsError(ReportedError):
    """Too many non-finite steps in a row."""

    exit_code = EXIT_NUMERICS


class DiskError(ReportedError):
    """No space or no permission where the run must write, or a failing disk."""

    exit_code = EXIT_DISK


class PeerError(ReportedError):
    """Another rank died, or did not answer in time."""

    exit_code = EXIT_PEER
    on_all_ranks = False


class LockError(ReportedError):
    """Another process is writing into the same run."""

    exit_code = EXIT_LOCK
