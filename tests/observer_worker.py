"""Two processes that train with DDP, each with an observer of its own; run as a program."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from neuvar import LabelObserver
from tests.observed import CLASSES, EXAMPLES, batches

RANKS = 2


def _work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    observer, report = LabelObserver(EXAMPLES, CLASSES), {}
    for step, batch in enumerate(batches()):
        if step == 5:
            observer.save(folder / "half.pt")
        if step % RANKS == rank:
            observer.update(*batch)
    observer.save(folder / "observed.pt")
    report["flagged"] = torch.from_numpy(observer.label_issues().flagged)
    resumed = LabelObserver.load(folder / "half.pt")
    for step, batch in enumerate(batches()):
        if step >= 5 and step % RANKS == rank:
            resumed.update(*batch)
    report["resumed"] = resumed.state_dict()["sums"]
    other = LabelObserver(EXAMPLES, CLASSES)
    other.update([3], torch.zeros(1, CLASSES), [rank])
    try:
        other.label_issues()
    except ValueError as error:
        report["error"] = str(error)
    torch.save(report, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(_work, (Path(sys.argv[1]),), nprocs=RANKS, start_method="spawn")
