"""The training run: features, steps, held-out acceptance, checkpoints, and the draft at the end."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_engine.training import checkpoints
from dflash_engine.training.checkpoints import Progress
from dflash_engine.training.checks import check_features, check_labels, check_masks, check_responses
from dflash_engine.training.config import SUMMARY, TrainConfig
from dflash_engine.training.draft_weights import Layout, initial, read_weights, tensor_shapes
from dflash_engine.training.engine_check import check_engine
from dflash_engine.training.export import export, readme
from dflash_engine.training.held_out import HeldOut
from dflash_engine.training.optimizer import Optimizer, rate
from dflash_engine.training.packing import PackedRows, pack
from dflash_engine.training.preparation import Prepared, prepare
from dflash_engine.training.ranks import Ranks
from dflash_engine.training.step import WARM_STEPS, TrainStep
from dflash_engine.training.target import Target, read_frozen
from dflash_engine.training.timing import StepClock, profiled
from dflash_engine.training.windows import Turn, Windows, window_count

Report = Callable[[dict[str, Any]], None]
TIMED_STEPS = 10
SHOWN_EVERY_S = 5.0
ASK_EVERY = 20
"""Steps between questions whether to stop, where there are several ranks."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of one start of a run, with no effect on what is trained."""

    stop: Callable[[], bool] = lambda: False
    """Asked at every step; then the state is saved, and the run can go on another time."""
    report: Report = lambda line: None
    profile: bool = False
    """Reports the time of each kernel over some steps."""


def train(config: TrainConfig, options: Options | None = None) -> dict[str, Any]:
    """Goes on where the output folder's state is, up to the end or `options.stop`; returns a summary.

    With torch.distributed initialised, each rank calls this with the same config, and rank 0 reports and
    writes. Raises `ConfigError`.
    """
    ranks = Ranks.find(config.run.device)
    prepared = ranks.first_alone(lambda: prepare(config, ranks.device))
    return Run(config, options or Options(), ranks, prepared).go()


class Run:
    """One start of a run."""

    def __init__(self, config: TrainConfig, options: Options, ranks: Ranks, prepared: Prepared) -> None:
        self._config, self._options, self._ranks, self._prepared = config, options, ranks, prepared
        self._output = Path(config.output)
        draft, device = prepared.draft, ranks.device
        frozen = read_frozen(config, prepared.sources, device)
        if config.draft.init_from is None:
            flat = initial(draft, frozen.final_norm, config.run.seed)
        else:
            flat = read_weights(Path(config.draft.init_from), draft, prepared.sources.model)
        flat = flat.to(device)
        optimizer = Optimizer(config.optimizer, flat, Layout(tensor_shapes(draft)))
        shape = (ranks.share(config.batch.rows), config.batch.anchors, config.data.row_tokens)
        self._step = TrainStep(draft, frozen, flat, optimizer, config.loss, config.run, shape)
        self._clock = StepClock(config, self._step)
        self._target: Target | None = None
        self._held_out: dict[str, HeldOut] = {}
        self._shown_s = time.perf_counter()

    def go(self) -> dict[str, Any]:
        config, step = self._config, self._step
        rows = pack(self._prepared.training, config.data.row_tokens, step.config.block_size, config.run.seed)
        rows = self._ranks.part_of(rows, config.run.seed)
        progress = self._begin(rows)
        self._check_before(rows)
        windows = Windows(
            config, rows, progress.windows, self._target_at_hand, step, self._ranks, self._show_features
        )
        if progress.step < progress.steps or not progress.steps:
            windows.enter(windows.turn(progress.step, progress.steps or 1))
            self._check_window(windows)
            if windows.count == 1 and config.features.place != "recompute":
                self._release_target()
        if not progress.steps:
            progress = replace(progress, steps=self._steps_for(windows))
        return self._end(self._steps(windows, progress))

    def _begin(self, rows: PackedRows) -> Progress:
        """Where the run stands, with its state loaded. Raises `ConfigError`."""
        wanted = Progress(
            step=0,
            steps=self._config.budget.steps or 0,
            windows=0,
            config_digest=self._config.digest,
            corpus_digest=self._prepared.corpus_digest,
            world_size=self._ranks.size,
        )
        found = checkpoints.load(self._output)
        if found is None:
            count = self._ranks.agreed(window_count(self._config, rows, self._step.features))
            return replace(wanted, windows=int(count))
        progress, tensors = found
        checkpoints.check(progress, wanted, self._output)
        for name, tensor in self._state().items():
            tensor.copy_(tensors[name])
        return progress

    def _state(self) -> dict[str, torch.Tensor]:
        return {"weights": self._step.flat, **self._step.optimizer.state}

    def _check_before(self, rows: PackedRows) -> None:
        """What can be seen without features. Raises `TrainingCheckFailed`."""
        check_labels(self._step, rows)
        check_masks(self._step, self._step.layout.views(self._step.flat), rows)
        if self._config.weights == "checkpoint":
            like = self._step.features
            own = check_responses(self._target_at_hand(), rows, self._config.checks, like)
            self._report({"event": "checked", "responses_own": round(own, 4)})
        for name, corpus in self._prepared.held_out.items():
            block = self._step.config.block_size
            packed = pack(corpus, self._config.data.row_tokens, block, self._config.run.seed)
            stops = self._prepared.sources.model.eos_token_ids
            if self._ranks.leads and packed.num_rows:
                self._held_out[name] = HeldOut(packed, self._target_at_hand(), self._step, stops)

    def _check_window(self, windows: Windows) -> None:
        """What the features show. Raises `TrainingCheckFailed`."""
        rows, features = windows.first_row()
        if self._config.features.place != "disk" or self._target is not None:
            check_features(self._target_at_hand(), rows, self._step.config.target_layer_ids, features)
        if self._config.checks.against_engine:
            difference = check_engine(self._step, rows, features)
            self._report({"event": "checked", "engine_difference": difference})

    def _steps(self, windows: Windows, progress: Progress) -> Progress:
        config, done = self._config, progress.step
        before, history = progress.seconds, list(progress.history)
        self._clock.start(done)

        def now() -> Progress:
            seconds = before + self._clock.seconds
            return replace(progress, step=done, seconds=seconds, history=tuple(history))

        while done < progress.steps:
            turn = windows.turn(done, progress.steps)
            planner = windows.enter(turn)
            profile = self._options.profile and not done
            plans = planner.plans(done - turn.first, turn.end - turn.first)
            for plan in self._clock.waited(profiled(plans, profile, self._report), windows.fetch):
                self._step.run(plan, rate(config.optimizer, done, progress.steps))
                done += 1
                ends = done == progress.steps
                if done % config.run.log_every == 0 or ends:
                    self._report({"event": "step", "steps": progress.steps, **self._clock.read(done)})
                if done % config.evaluation.every == 0 or ends:
                    history.append(self._measure(done))
                stops = self._stops(done)
                if done % config.run.checkpoint_every == 0 or ends or stops:
                    self._save(now())
                if stops and not ends:
                    return now()
        return now()

    def _stops(self, done: int) -> bool:
        """Asked of rank 0 for all, now and then: an answer waits for the device."""
        if self._ranks.size > 1 and done % ASK_EVERY:
            return False
        return bool(self._ranks.agreed(self._options.stop()))

    def _measure(self, done: int) -> dict[str, Any]:
        with self._clock.paused():
            found = {name: held_out.measure() for name, held_out in self._held_out.items()}
            line = {"step": done, "acceptance_length": {name: each.length for name, each in found.items()}}
            rates = {name: [round(rate, 3) for rate in each.rates] for name, each in found.items()}
            self._report({"event": "held_out", **line, "rates": rates})
        return line

    def _save(self, progress: Progress) -> None:
        with self._clock.paused():
            if self._ranks.leads:
                checkpoints.save(self._output, progress, self._state())
            self._ranks.wait()

    def _steps_for(self, windows: Windows) -> int:
        """As many as fill the budget's seconds, by the time of some that are then taken back."""
        assert self._config.budget.seconds is not None
        kept = {name: tensor.clone() for name, tensor in self._state().items()}
        planner = windows.enter(Turn(0, 0, 1))
        seconds = 0.0
        with self._clock.paused():
            for number in range(WARM_STEPS + 1 + TIMED_STEPS):
                if number == WARM_STEPS + 1:
                    self._clock.synchronize()
                    seconds = -time.perf_counter()
                plan = planner.plan(number)
                windows.fetch(plan)
                self._step.run(plan, 0.0)
            self._clock.synchronize()
            seconds = (seconds + time.perf_counter()) / TIMED_STEPS
        for name, tensor in self._state().items():
            tensor.copy_(kept[name])
        self._step.tally.zero_()
        steps = max(int(self._config.budget.seconds / seconds), 1)
        return int(self._ranks.agreed(steps))

    def _end(self, progress: Progress) -> dict[str, Any]:
        """Writes the draft as it is, and tells what there is to tell."""
        prepared, last = self._prepared, progress.history[-1] if progress.history else {}
        data = {
            "sequences": len(prepared.training),
            "response_tokens": prepared.training.response_tokens,
            "contaminated": prepared.num_contaminated,
        }
        summary: dict[str, Any] = {
            "output": str(self._output),
            "finished": progress.step == progress.steps,
            "step": progress.step,
            "steps": progress.steps,
            "seconds": progress.seconds,
            "parameters": self._step.flat.numel(),
            "acceptance_length": last.get("acceptance_length", {}),
            **data,
        }
        if self._ranks.leads:
            page = readme(
                self._config,
                prepared.draft,
                self._step.flat.numel(),
                data,
                progress.history,
                progress.step,
                progress.seconds,
            )
            views = self._step.layout.views(self._step.flat)
            model = prepared.sources.model
            summary["weight_bytes"] = export(self._output / "draft", prepared.draft, model, views, page)
            (self._output / SUMMARY).write_text(json.dumps(summary) + "\n")
        self._ranks.wait()
        return summary

    def _target_at_hand(self) -> Target:
        if self._target is None:
            self._target = Target(self._config, self._prepared.sources, self._ranks.device)
        return self._target

    def _release_target(self) -> None:
        self._target = None
        gc.collect()
        if self._ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def _show_features(self, done: int, of: int) -> None:
        now = time.perf_counter()
        if done == of or now - self._shown_s > SHOWN_EVERY_S:
            self._shown_s = now
            self._report({"event": "features", "rows": done, "of": of})

    def _report(self, line: dict[str, Any]) -> None:
        if self._ranks.leads:
            self._options.report(line)
