"""The encoder spread over the ranks of a process group, data-parallel: every rank has the whole encoder and takes a
share of each batch.

    dist.init_process_group("nccl")
    encoder = DataParallelEncoder(Encoder.from_pretrained(...))      # on every rank
    features = encoder.encode(images)                                # the same list on every rank, in its order

Items are spread by load, the heaviest first, to the rank with the least so far: a pure function of sizes, so all ranks
agree without talking. Each rank encodes its share by the one-replay rule. Then the ranks tell each other on the host
how it went, and one `all_gather` of padded rows brings every result to every rank. No collective is inside a graph.
"""

import hashlib
import heapq
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from onereplay.core.items import Item
from onereplay.core.stats import Report
from onereplay.encoder import Encoder, Source, VideoOptions
from onereplay.errors import OnereplayError, RankError

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""One tensor to one tensor; PyTorch 2.13 gave it a new name."""

MESSAGE_BYTES = 2048
"""Room for the text of a rank's error."""


def spread(loads: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Which items each rank takes: the heaviest first, each to the rank with the least load so far.

    Args:
        loads: of each item, in patches.
        num_ranks: at least 1.

    Returns:
        For each rank the places of its items, ascending; a rank may have none. Ties go to the lower place and the lower
        rank, so the same loads give the same shares everywhere. The largest share is at most 4/3 of the best possible
        (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    lightest = [(0, rank) for rank in range(num_ranks)]
    for place in sorted(range(len(loads)), key=lambda place: (-loads[place], place)):
        load, rank = heapq.heappop(lightest)
        shares[rank].append(place)
        heapq.heappush(lightest, (load + loads[place], rank))
    return [sorted(share) for share in shares]


def load_of(item: Item) -> int:
    """Patches over all paths."""
    return sum(size.patches for size in item.sizes.values())


class DataParallelEncoder:
    """An encoder on every rank of a group, with the batch spread over them.

    Every rank makes one, with the same model and options, and every call is collective: all ranks call with the same
    batch, and get the same list. A rank that fails makes the call fail on all ranks with its message; the next call
    works again. A rank that is gone ends the call with the error of the group.

    Args:
        encoder: this rank's encoder.
        group: of any back end; the default group by default. Results cross in it, in one `all_gather`. What ranks tell
            each other about the call crosses on the host, in a group of gloo that is made here where `group` is of
            another back end: it works when a device does not, and waits for none.

    Raises:
        OnereplayError: no process group is initialised.
    """

    def __init__(self, encoder: Encoder, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise OnereplayError("no process group; call torch.distributed.init_process_group on every rank first")
        self.encoder, self.group = encoder, group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._through_host = dist.get_backend(group) == "gloo"
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._host_group = group
        if not self._through_host:  # made by its own ranks alone: others of the job may never come here
            self._host_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def encode(
        self, sources: Sequence[Source], *, video: VideoOptions | None = None, allow_urls: bool = False
    ) -> list[Tensor]:
        """Encode images and videos as one batch. Every rank decodes its own share alone.

        Returns:
            One tensor a source, in order, on every rank: `(tokens, hidden)`, the caller's own.

        Raises:
            RankError: another rank failed; names it and its message.
            MediaError, InputError, ...: this rank failed; as `Encoder.encode`.
        """
        prepare = self.encoder.preprocessor

        def encode(places: Sequence[int]) -> list[Tensor]:
            mine = [sources[place] for place in places]
            return self.encoder.encode(mine, video=video, allow_urls=allow_urls)

        return self._collective(lambda: [prepare.item(source, video)[0] for source in sources], encode)

    def encode_inputs(self, **inputs: Any) -> list[Tensor]:
        """Encode what the model's processor returned, given whole to every rank; pixels of other ranks are not read.

        Raises:
            RankError: another rank failed; names it and its message.
            InputError: as `Encoder.encode_inputs`.
        """
        batches: list[Any] = []

        def items() -> Sequence[Item]:
            batches.append(self.encoder.adapter.batch(**inputs))
            return batches[0].items  # type: ignore[no-any-return]

        def encode(places: Sequence[int]) -> list[Tensor]:
            return self.encoder.manager.encode(self.encoder.adapter.select(batches[0], places))

        return self._collective(items, encode)

    def _collective(
        self, items: Callable[[], Sequence[Item]], encode: Callable[[Sequence[int]], list[Tensor]]
    ) -> list[Tensor]:
        """Spread, encode, tell, gather. All that can fail on one rank alone comes before the telling."""
        digest = 0
        try:
            listed = items()
            digest = _digest(listed)
            shares = spread([load_of(item) for item in listed], self.num_ranks)
            padded, gathered = self._gather_buffers(listed, shares)
            mine = shares[self.rank]
            results = encode(mine) if mine else []
            if [len(rows) for rows in results] != [listed[place].num_rows for place in mine]:
                raise OnereplayError(f"results of {[len(rows) for rows in results]} rows; the items announce others")
            if results:
                torch.cat(results, out=padded[: sum(len(rows) for rows in results)])
        except Exception as error:  # whatever it is, the other ranks must hear of it before it leaves
            self._exchange(digest, f"{type(error).__name__}: {error}")
            raise
        self._raise_of_others(self._exchange(digest, ""))
        return self._gather(padded, gathered, listed, shares)

    def _gather_buffers(self, items: Sequence[Item], shares: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Room for this rank's rows, padded to the largest share, and for those of all ranks."""
        rows = max(sum(items[place].num_rows for place in share) for share in shares)
        shape = self.encoder.adapter.result_shape
        kind: Any = {"dtype": self.encoder.dtype, "device": self.encoder.device}
        return torch.zeros(rows, *shape, **kind), torch.empty(self.num_ranks, rows, *shape, **kind)

    def _exchange(self, digest: int, message: str) -> list[tuple[int, str]]:
        """What every rank says of the call: which batch it was given, and why it failed, if it did."""
        said = digest.to_bytes(8, "big") + message.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
        sent = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        heard = [torch.empty_like(sent) for _ in range(self.num_ranks)]
        dist.all_gather(heard, sent, group=self._host_group)
        raw = [one.numpy().tobytes() for one in heard]
        return [(int.from_bytes(one[:8], "big"), one[8:].rstrip(b"\0").decode(errors="replace")) for one in raw]

    def _raise_of_others(self, said: Sequence[tuple[int, str]]) -> None:
        failed = [f"rank {rank} failed: {message}" for rank, (_, message) in enumerate(said) if message]
        if failed:
            raise RankError("; ".join(failed))
        if len({digest for digest, _ in said}) > 1:
            raise RankError("the ranks were given different batches; every rank must call with the same one")

    def _gather(
        self, padded: Tensor, gathered: Tensor, items: Sequence[Item], shares: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """All rows on every rank in one `all_gather`: as bytes, which every back end moves whatever the dtype is."""
        if not padded.numel():
            return [padded[:0] for _ in items]
        sent, heard = (tensor.cpu() if self._through_host else tensor for tensor in (padded, gathered))
        _all_gather(heard.view(torch.uint8), sent.view(torch.uint8)[None], group=self.group)
        found: dict[int, Tensor] = {}
        for share, rows in zip(shares, heard.to(padded.device), strict=True):
            counts = [items[place].num_rows for place in share]
            found |= dict(zip(share, rows[: sum(counts)].split(counts), strict=True))
        return [found[place] for place in range(len(items))]

    def report(self) -> Report:
        """What this rank did so far."""
        return self.encoder.report()

    def close(self) -> None:
        """Close this rank's encoder. The process groups are left to whoever owns them."""
        self.encoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _digest(items: Sequence[Item]) -> int:
    """A number that differs for batches of other sizes."""
    sizes = [(item.modality.value, sorted(item.sizes.items()), item.num_rows) for item in items]
    return int.from_bytes(hashlib.sha256(repr(sizes).encode()).digest()[:8], "big")
