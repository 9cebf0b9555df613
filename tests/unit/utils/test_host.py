"""Memory as the host, a container and a batch job's cgroup have it."""

from __future__ import annotations

from pathlib import Path

from megatron_sp.utils.host import host_memory_bytes, swap_bytes


def host(root: Path, available_kib: int | None, limit: str = "max", current: int = 0, cached: int = 0) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    if available_kib is not None:
        (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\nSwapFree: 100 kB\n")
    return group(root, "", limit, current, cached)


def group(root: Path, path: str, limit: str, current: int = 0, cached: int = 0) -> Path:
    """A cgroup of version 2."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    return root


def test_memory_of_a_host_and_of_a_container(tmp_path: Path) -> None:
    assert host_memory_bytes(host(tmp_path / "a", 1000)) == 1000 * 1024
    assert host_memory_bytes(host(tmp_path / "b", 1000, "500000", 400000, 50000)) == 150000
    assert host_memory_bytes(host(tmp_path / "c", None, "500000", 600000)) == 0
    assert host_memory_bytes(host(tmp_path / "d", 1000, "nonsense")) == 1000 * 1024
    assert host_memory_bytes(tmp_path / "nowhere") is None and swap_bytes(tmp_path / "nowhere") == 0
    assert (host_memory_bytes() or 1) > 0 and swap_bytes() >= 0


def test_the_tightest_of_the_groups_around_a_batch_job(tmp_path: Path) -> None:
    """Slurm limits the job, and not the task's own group."""
    root = host(tmp_path, 1000)
    (root / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    group(root, "slurm/job_7/step_0", "max", 90000)
    group(root, "slurm/job_7", "300000", 100000)
    assert host_memory_bytes(root) == 200000
    assert swap_bytes(root) == 100 * 1024
    (root / "sys/fs/cgroup/slurm/job_7/memory.swap.max").write_text("0\n")
    (root / "sys/fs/cgroup/slurm/job_7/memory.swap.current").write_text("0\n")
    assert swap_bytes(root) == 0


def test_groups_of_version_1(tmp_path: Path) -> None:
    root = host(tmp_path, 1000)
    (root / "proc/self/cgroup").write_text("5:devices:/\n4:cpu,memory:/docker/12ab\n0::/\n")
    for path, limit in (("", 9223372036854771712), ("docker", 9223372036854771712), ("docker/12ab", 400000)):
        folder = root / "sys/fs/cgroup/memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text("150000\n")
        (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50000\n")
    assert host_memory_bytes(root) == 300000
