"""What the processes of `test_data_parallel` run: every rank does all cases in order and returns what it saw."""

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch.multiprocessing.spawn import spawn

from onereplay import EncoderCudaGraphConfig
from onereplay.encoder import Encoder
from onereplay.geometry import Grid
from onereplay.parallel import DataParallelEncoder

Seen = dict[str, Any]
BUDGETS = (64, 128, 512)


def tiny(spec: str) -> Encoder:
    """The same weights in every process."""
    torch.set_num_threads(1)
    return Encoder.from_preset(spec, config=EncoderCudaGraphConfig(token_budgets=BUDGETS, backend="traced"))


def inputs(encoder: Encoder, grids: list[Grid]) -> dict[str, Any]:
    """The same pixels in every process."""
    return dict(encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(3)))


def images(count: int) -> list[Image.Image]:
    """Pictures of different sizes and colours."""
    return [Image.new("RGB", (56 * (1 + place), 84), (10 * place, 90, 200 - 5 * place)) for place in range(count)]


def error_of(call: Callable[[], Any]) -> str:
    """The type and text of what the call raises; empty if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_cases(parallel: DataParallelEncoder, batches: Mapping[str, list[Grid]]) -> Seen:
    """Every batch's features, then what failures do, then a batch again."""
    encoder, seen = parallel.encoder, Seen()
    for name, grids in batches.items():
        seen[name] = parallel.encode_inputs(**inputs(encoder, grids))
    seen["no items"] = parallel.encode_inputs()
    first = next(iter(batches.values()))

    stock = encoder.manager.encode
    if parallel.rank == 1:
        encoder.manager.encode = _out_of_memory  # type: ignore[method-assign]
    seen["rank 1 fails"] = error_of(lambda: parallel.encode_inputs(**inputs(encoder, first)))
    encoder.manager.encode = stock  # type: ignore[method-assign]

    mine = first if parallel.rank else first[1:]
    seen["different batches"] = error_of(lambda: parallel.encode_inputs(**inputs(encoder, mine)))
    bad = {"image_embeds": torch.zeros(1)} if parallel.rank == 0 else inputs(encoder, first)
    seen["rank 0 is given a bad name"] = error_of(lambda: parallel.encode_inputs(**bad))
    seen["again"] = parallel.encode_inputs(**inputs(encoder, first))
    return seen


def photo_cases(parallel: DataParallelEncoder) -> Seen:
    """Features of pictures, and how many of them this rank decoded."""
    decoded = 0
    stock = parallel.encoder.preprocessor.batch

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return stock(*args, **options)

    parallel.encoder.preprocessor.batch = counted  # type: ignore[method-assign]
    features = parallel.encode(images(5))
    missing = error_of(lambda: parallel.encode([*images(1), "no such file.png"]))
    return {"features": features, "decoded": decoded, "missing": missing}


def _out_of_memory(batch: Any) -> Any:
    raise torch.OutOfMemoryError("no memory on this rank")


def worker(rank: int, num_ranks: int, folder: str, spec: str, batches: Mapping[str, list[Grid]]) -> None:
    """One rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        with DataParallelEncoder(tiny(spec)) as parallel:
            seen = all_cases(parallel, batches)
            if spec.startswith("qwen"):
                seen |= photo_cases(parallel)
            seen["report"] = parallel.report()
    except Exception:
        seen = {"crash": traceback.format_exc()}
    torch.save(seen, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run(folder: Path, num_ranks: int, spec: str, batches: Mapping[str, list[Grid]]) -> list[Seen]:
    """What every rank saw."""
    spawn(worker, args=(num_ranks, str(folder), spec, batches), nprocs=num_ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def subgroup_worker(rank: int, folder: str, spec: str, grids: list[Grid]) -> None:
    """One of three ranks, of which the first two share an encoder over a group that is said to be of NCCL."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.get_backend = lambda group=None: "nccl"  # type: ignore[assignment,return-value]
        with DataParallelEncoder(tiny(spec), pair) as parallel:
            torch.save(parallel.encode_inputs(**inputs(parallel.encoder, grids)), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
