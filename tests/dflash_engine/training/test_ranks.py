"""Several processes train as one: their gradients are those of one batch, and their weights stay the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from dflash_engine.training.checkpoints import load
from dflash_engine.training.packing import pack
from dflash_engine.training.ranks import Ranks
from tests.dflash_engine.training.test_corpus import random_corpus
from tests.dflash_engine.training.tiny_run import CPU, config_for, target_folder, write_data

RANK = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.ranks import Ranks, launched
from dflash_engine.training.preparation import prepare
from dflash_engine.training.trainer import Options, Run

config = TrainConfig(**json.loads(Path(sys.argv[1]).read_text()))
with launched("cpu"):
    ranks = Ranks.find("cpu")
    prepared = ranks.first_alone(lambda: prepare(config, ranks.device))
    run = Run(config, Options(), ranks, prepared)
    run.go()
    save_file(run._state(), f"{config.output}/rank-{ranks.rank}.safetensors")
"""


def test_rows_are_shared_out_without_overlap():
    rows = pack(random_corpus(100), 32, 6, seed=0)
    parts = [Ranks(rank, 3, CPU).part_of(rows, seed=0) for rank in range(3)]
    assert {part.num_rows for part in parts} == {rows.num_rows // 3}
    seen = [number for part in parts for *_, number in part.sequences]
    assert len(seen) == len(set(seen))


def test_two_processes_end_with_the_same_weights(tmp_path: Path):
    target = target_folder(tmp_path)
    data = write_data(target, tmp_path / "data", 60)
    config = config_for(target, data, tmp_path / "out", budget={"steps": 8}, evaluation={"every": 8})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "config.json")],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]
    from safetensors.torch import load_file

    one, other = (load_file(tmp_path / "out" / f"rank-{rank}.safetensors") for rank in range(2))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    found = load(tmp_path / "out")
    assert found is not None and found[0].world_size == 2 and found[0].step == 8
    assert torch.equal(found[1]["weights"], one["weights"])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["finished"] and np.isfinite(summary["acceptance_length"]["held_out"])
