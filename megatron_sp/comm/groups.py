"""Process groups of one parallel layout, built once and passed around as an object.

Axes from slowest to fastest varying: pp, dp, cp, sp, tp: neighbouring ranks get the axis that communicates most.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_sp.comm.devices import identity_of, require_own_gpu
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.launch import Address, Launch

Group = dist.ProcessGroup
_DEFAULT_TIMEOUT = timedelta(minutes=10)
_POLL_S = 0.02


class _Alone:
    # one rank that needs no torch process group, for generation, tools and unit tests
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


SINGLE_RANK = cast(Group, _Alone())


def announced(
    group: Group, op: str, x: Tensor | None = None, *, send: Sequence[int] = (), receive: Sequence[int] = ()
) -> Group:
    """Return torch's process group behind ``group``; for a checked one, once all its ranks announced the same call.

    ``x``: the operand; ``send``, ``receive``: elements to and from each rank, if they may differ between ranks.
    """
    announce = getattr(group, "announce", None)
    if announce is not None:  # a CheckedGroup, whose module only --check-collectives imports
        announce(op, x, send, receive)
    return unchecked(group)


def unchecked(group: Group) -> Group:
    """Return torch's process group behind ``group``."""
    return cast(Group, getattr(group, "process_group", group))


def world_group() -> Group:
    """Return the group of all ranks of this job; a group of one rank if no job was joined."""
    return dist.group.WORLD if dist.is_initialized() and dist.group.WORLD is not None else SINGLE_RANK


@dataclass(frozen=True)
class NcclOptions:
    """Settings of the NCCL communicators of sp, cp and dp; without effect on gloo."""

    sp_ctas: int | None = None  # CTAs that an exchange of sp or cp takes at most; None: NCCL decides
    dp_ctas: int | None = None  # the same for gradients and parameters
    cta_policy: str = "default"  # default, efficiency or zero; the last two need NCCL 2.27 and 2.28

    def of(self, axis: str) -> dict[str, int]:
        # fields of NCCL's configuration to set for an axis; none for tp and pp
        if axis in ("tp", "pp"):
            return {}
        name, most = ("dp", self.dp_ctas) if axis == "dp" else ("sp", self.sp_ctas)
        fields = {} if most is None else {"max_ctas": most}
        text = os.environ.get("NCCL_MIN_CTAS", "")
        least = int(text) if text.isascii() and text.isdigit() else 0
        if most is not None and least > most:
            raise ConfigError(f"--nccl-{name}-ctas ({most}) is less than NCCL_MIN_CTAS ({least}): lower the latter")
        if self.cta_policy != "default":
            name = f"NCCL_CTA_POLICY_{self.cta_policy.upper()}"
            policy = getattr(getattr(dist, "ProcessGroupNCCL", None), name, None)
            if policy is None:
                raise ConfigError(
                    f"--nccl-cta-policy {self.cta_policy}: torch {torch.__version__} was built with an NCCL without"
                    f" {name}; use default"
                )
            fields["cta_policy"] = policy
        return fields


_AS_NCCL_DECIDES = NcclOptions()


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of a layout."""

    mesh: DeviceMesh  # with axes (pp, dp, cp, sp, tp)
    pp: Group
    dp: Group
    cp: Group
    sp: Group
    tp: Group
    dp_cp_sp: Group  # over dp, cp and sp together, over which parameters are replicated
    pp_tp: Group  # over pp and tp together, which has all parameters of the model once
    # dp_cp_sp ranks on the first and the last pipeline rank, which share a tied table; None between, without a pipeline
    ends: Group | None
    world: Group
    control: Group  # gloo, of all ranks, for small messages from the CPU; without a GPU the default group
    device: torch.device  # of this rank's tensors

    @classmethod
    def create(
        cls, device: torch.device, *, tp_size: int = 1, sp_size: int = 1, cp_size: int = 1, pp_size: int = 1,
        timeout: timedelta | None = None, check: bool = False, nccl: NcclOptions = _AS_NCCL_DECIDES,
        control: Group | None = None,
    ) -> ParallelGroups:  # fmt: skip
        """Build the groups, after ``init_process_group``; ``control``: that of another layout of the same ranks.

        Raises:
            ConfigError: NCCL here does not know a setting.
            ValueError: the sizes do not divide the world size.
        """
        world_size = dist.get_world_size()
        of_replica = pp_size * cp_size * sp_size * tp_size
        if world_size % of_replica:
            raise ValueError(
                f"world_size ({world_size}) must be a multiple of pp_size * cp_size * sp_size * tp_size"
                f" ({pp_size} * {cp_size} * {sp_size} * {tp_size} = {of_replica})"
            )
        shape = {"pp": pp_size, "dp": world_size // of_replica, "cp": cp_size, "sp": sp_size, "tp": tp_size}
        by_axis = {axis: _options(size, device, axis != "dp", nccl.of(axis)) for axis, size in shape.items()}
        options: dict[int | str, Any] = {axis: option for axis, option in by_axis.items() if option is not None}
        sizes, names = tuple(shape.values()), tuple(shape)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names, backend_override=options)
        if control is not None:
            control = unchecked(control)
        else:
            control = dist.new_group(backend="gloo", timeout=timeout) if device.type != "cpu" else dist.group.WORLD
        assert dist.group.WORLD is not None and control is not None
        dp_cp_sp = mesh.get_group("dp")
        if cp_size * sp_size > 1:
            over_all = _options(world_size // tp_size // pp_size, device, False, nccl.of("dp"))
            dp_cp_sp = mesh["dp", "cp", "sp"]._flatten("dp_cp_sp", over_all).get_group()
        groups = {
            "world": dist.group.WORLD, "control": control, "tp": mesh.get_group("tp"), "sp": mesh.get_group("sp"),
            "cp": mesh.get_group("cp"), "dp": mesh.get_group("dp"), "pp": mesh.get_group("pp"), "dp_cp_sp": dp_cp_sp,
            "pp_tp": _over(mesh, ("pp", "tp"), device), **_ends(mesh, device, nccl),
        }  # fmt: skip
        if check:
            from megatron_sp.comm.check import check_groups

            groups = check_groups(groups, timeout or _DEFAULT_TIMEOUT)
        ends = groups.pop("ends", None)
        return cls(mesh=mesh, device=device, ends=ends, **groups)

    def destroy(self) -> None:
        # but not those of all ranks. Collective
        own_groups = [self.tp, self.sp, self.cp, self.dp, self.pp, self.dp_cp_sp, self.pp_tp]
        own_groups += [] if self.ends is None else [self.ends]
        axes = {id(group): group for group in map(unchecked, own_groups)}
        for group in axes.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    @property
    def rank(self) -> int:
        return self.world.rank()

    @property
    def world_size(self) -> int:
        return self.world.size()

    @property
    def tp_rank(self) -> int:
        return self.tp.rank()

    @property
    def pp_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(unchecked(self.pp))

    @property
    def pp_rank(self) -> int:
        return self.pp.rank()

    @property
    def dp_rank(self) -> int:
        return self.dp.rank()

    @property
    def is_first_of_replica(self) -> bool:
        # the rank that reports what all of a replica would report alike
        return self.tp.rank() == 0 and self.sp.rank() == 0 and self.cp.rank() == 0 and self.pp.rank() == 0

    @property
    def dp_size(self) -> int:
        return self.dp.size()


def _over(mesh: DeviceMesh, axes: tuple[str, str], device: torch.device) -> Group:
    # the group over two axes together; that of one of them if the other has one rank. Collective
    sizes = {axis: mesh[axis].size() for axis in axes}
    longer = [axis for axis in axes if sizes[axis] > 1]
    if len(longer) < 2:
        return mesh.get_group(longer[0] if longer else axes[0])
    return mesh[axes]._flatten("_".join(axes), _options(sizes[axes[0]] * sizes[axes[1]], device, False)).get_group()


def _ends(mesh: DeviceMesh, device: torch.device, nccl: NcclOptions) -> dict[str, Group]:
    # the group ``ends``, under its name; nothing without a pipeline, and between its ends. Collective
    ranks, by_axis = mesh.mesh, dict[str, Group]()  # [pp, dp, cp, sp, tp]
    if ranks.shape[0] == 1:
        return by_axis
    for tp_rank in range(ranks.shape[-1]):
        members = ranks[[0, -1]][..., tp_rank].flatten().tolist()
        everybody = len(members) == dist.get_world_size()
        group = dist.group.WORLD if everybody else _new_group(members, device, nccl.of("dp"))
        if dist.get_rank() in members:
            assert group is not None
            by_axis["ends"] = group
    return by_axis


def expert_groups(groups: ParallelGroups, ep_size: int, *, over_tp: bool, check: bool = False) -> dict[str, Group]:
    """Make the groups of experts over dp, cp and sp, with ``over_tp`` over tp, too. Collective over all ranks.

    By name: ``ep`` has different experts; ``replicas``, ``sequence`` and ``tokens`` are those of ``ExpertParallel``.
    """
    ranks, device = groups.mesh.mesh, groups.device  # [pp, dp, cp, sp, tp]
    pp_size, dp_size, tp_size = ranks.shape[0], ranks.shape[1], ranks.shape[-1]
    if over_tp:
        lines = ranks.reshape(pp_size, -1)
        sequences = ranks.reshape(pp_size * dp_size, -1)
    else:
        lines = ranks.reshape(pp_size, -1, tp_size).transpose(1, 2).reshape(pp_size * tp_size, -1)
        by_tp = ranks.reshape(pp_size * dp_size, -1, tp_size).transpose(1, 2)
        sequences = by_tp.reshape(pp_size * dp_size * tp_size, -1)
    if lines.shape[1] % ep_size:
        axes = f"{'tp * ' if over_tp else ''}sp * cp * dp ({lines.shape[1]})"
        raise ValueError(f"ep_size ({ep_size}) must divide the number of ranks that have different tokens, {axes}")
    by_ep = lines.reshape(-1, lines.shape[1] // ep_size, ep_size)
    by_name = {
        "ep": _own_group(by_ep.flatten(0, 1).tolist(), groups, device, urgent=True),
        "replicas": _own_group(by_ep.transpose(1, 2).flatten(0, 1).tolist(), groups, device),
        "sequence": _own_group(sequences.tolist(), groups, device, urgent=True),
        "tokens": _own_group(lines.tolist(), groups, device),
    }
    if check:
        from megatron_sp.comm.check import check_groups

        large = {name: group for name, group in by_name.items() if group is not SINGLE_RANK}
        by_name |= check_groups(large, _DEFAULT_TIMEOUT)
    return by_name


def _own_group(lines: list[list[int]], groups: ParallelGroups, device: torch.device, *, urgent: bool = False) -> Group:
    rank = dist.get_rank()
    if len(lines[0]) == 1:
        return SINGLE_RANK
    # urgent exchanges do not queue behind gradients in a communicator
    known = [groups.sp, groups.cp, groups.tp] if urgent else [groups.dp_cp_sp]
    own_ranks = next(line for line in lines if rank in line)
    # the layout is the same everywhere: whether a group exists is, too
    for group in map(unchecked, known):
        if group.size() > 1 and dist.get_process_group_ranks(group) == own_ranks:
            return group
    new_groups = [_new_group(line, device, {}, urgent=urgent) for line in lines]  # every rank takes part in making each
    own = new_groups[lines.index(own_ranks)]
    assert own is not None
    return own


def _new_group(ranks: list[int], device: torch.device, fields: dict[str, int], *, urgent: bool = False) -> Group | None:
    options = _options(len(ranks), device, urgent, fields)
    timeout = options._timeout if options is not None else None
    of_nccl = options if dist.get_backend() == "nccl" else None
    return cast("Group | None", dist.new_group(ranks, timeout=timeout, pg_options=of_nccl))


def groups_of_pairs(pairs: Collection[tuple[int, int]]) -> dict[tuple[int, int], int]:
    # the number of a group for each pair, the same on all ranks; no rank is in two pairs of a group
    colours: dict[tuple[int, int], int] = {}
    for pair in sorted(pairs):
        taken = {colour for other, colour in colours.items() if set(other) & set(pair)}
        colours[pair] = next(colour for colour in range(len(colours) + 1) if colour not in taken)
    return colours


def pipes(mesh: DeviceMesh, pairs: Collection[tuple[int, int]], device: torch.device) -> dict[tuple[int, int], Group]:
    """Return a group for each pair (source, target) of pipeline ranks with this one. Collective over all ranks."""
    colours = groups_of_pairs(pairs)
    lines = mesh.mesh.flatten(1).t().tolist()  # ranks of each pipeline
    # in each group a rank has one neighbour and one direction: on NCCL a group can be a single stream, in which a
    # receive that waits would hold up a send behind it
    groups: dict[int, Group] = {}
    for colour in range(max(colours.values(), default=-1) + 1):
        for line in lines:
            pair_group = _new_group(line, device, {}, urgent=True)
            if dist.get_rank() in line:
                assert pair_group is not None
                groups[colour] = pair_group
    rank = mesh["pp"].get_local_rank()
    return {pair: groups[colour] for pair, colour in colours.items() if rank in pair}


def _options(size: int, device: torch.device, urgent: bool, fields: dict[str, int] | None = None) -> Any:
    world = dist.group.WORLD
    assert world is not None
    nccl = dist.get_backend(world) == "nccl"
    # without options torch takes the job's own group for all ranks, and for a smaller one a timeout of its own
    if size == 1 or (size == world.size() and not (nccl and (urgent or fields))):
        return None
    timeout = world._get_backend(device).options._timeout
    if not nccl:
        return Backend.Options(dist.get_backend(world), timeout)
    # urgent: layers wait for them. With a high-priority stream their kernels start while a GEMM launched earlier still
    # occupies the GPU, whatever CUDA_DEVICE_MAX_CONNECTIONS is
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options._timeout = timeout
    for name, value in (fields or {}).items():
        setattr(options.config, name, value)
    return options


def init_process_group(launch: Launch, device: torch.device, backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed with ``backend`` auto, nccl or gloo; one process needs no launcher and no port."""
    chosen = backend if backend != "auto" else "nccl" if device.type == "cuda" else "gloo"
    if launch.world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        assert launch.address is not None, "several ranks need a place to meet"
        store = fresh_store(launch.address, launch.rank, launch.world_size, timeout)
    if device.type == "cuda" and launch.world_size > 1:
        require_own_gpu(store, launch.rank, launch.world_size, identity_of(device))
    device_id = device if chosen == "nccl" else None
    rank, world_size = launch.rank, launch.world_size
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id)


def fresh_store(address: Address, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store at an address, the launcher's or rank 0's, under a prefix that no earlier attempt has used."""
    # torchrun keeps one store for all attempts (pytorch #135712): gloo would find addresses of processes that died in
    # the one before, and hang. So each rank stores a new random token under its name, and rank 0 answers every token
    # that it sees with a fresh prefix, under a key that contains the token
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # torch counts arrivals over all attempts, which may never be a multiple of this one's size: do not wait for them
    store = dist.TCPStore(
        *address, world_size, is_master=rank == 0 and not shared, timeout=timeout, multi_tenant=True,
        wait_for_workers=False,
    )  # fmt: skip
    space = dist.PrefixStore("megatron_sp", store)
    prefix = _offer_prefix(space, world_size, timeout) if rank == 0 else _accept_prefix(space, rank)
    return dist.PrefixStore(prefix, store)


def _offer_prefix(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    prefix, waiting = uuid.uuid4().hex, list(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        for rank in waiting:  # again and again: the token that was there may be that of an earlier attempt
            if store.check([f"hello/{rank}"]):
                store.set(f"answer/{store.get(f'hello/{rank}').decode()}", prefix)
        waiting = [rank for rank in waiting if not store.check([f"confirmed/{prefix}/{rank}"])]
        if waiting and time.monotonic() > deadline:
            late = f"ranks {waiting[:8]} of {world_size}"
            raise RuntimeError(f"timed out: {late} did not join within {timeout.total_seconds():.0f} s")
        time.sleep(_POLL_S if waiting else 0)
    return prefix


def _accept_prefix(store: dist.Store, rank: int) -> str:
    token = uuid.uuid4().hex
    store.set(f"hello/{rank}", token)
    prefix = store.get(f"answer/{token}").decode()  # waits
    store.set(f"confirmed/{prefix}/{rank}", "1")
    return prefix


def background_group(world_size: int, timeout: timedelta) -> Group | None:
    """Return a gloo group of all ranks for a background thread; None for one process. Collective."""
    if world_size == 1:
        return None
    # collectives of another thread must not mix with training's
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert control is not None
    return control


def destroy_process_group() -> None:
    """Destroy the default process group, if it was initialised."""
    if dist.is_initialized():
        dist.destroy_process_group()
