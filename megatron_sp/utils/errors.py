"""Errors reported to users, and exit codes."""

from __future__ import annotations

# torchrun turns every code into 1, so the code is also written to run_status.json of the run
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
    """A failure that its message fully explains."""

    # any other exception is a bug of ours; entry points print it without a traceback and exit with this code
    exit_code = 1
    # every rank raises it, so only rank 0 prints it; False for an error that only one rank raises
    on_all_ranks = True


class ConfigError(ReportedError, ValueError):
    """Flags that cannot work."""

    exit_code = EXIT_CONFIG


class CheckpointError(ReportedError):
    """Checkpoint that is missing, incomplete, damaged, or of another model."""

    exit_code = EXIT_CHECKPOINT


class DataError(ReportedError):
    """Data or tokenizer that is missing, damaged, or does not fit the model."""

    exit_code = EXIT_DATA


class NumericsError(ReportedError):
    """Too many non-finite steps."""

    exit_code = EXIT_NUMERICS


class DiskError(ReportedError):
    """No space, no permission, or a failing disk."""

    exit_code = EXIT_DISK


class PeerError(ReportedError):
    """Another rank died or hangs."""

    exit_code = EXIT_PEER
    on_all_ranks = False


class LockError(ReportedError):
    """The run is in use."""

    exit_code = EXIT_LOCK
