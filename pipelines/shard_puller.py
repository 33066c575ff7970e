"""A replica's side of the desk: shards of batch jobs through the engine that serves, as it has slack.

The rows go in at batch priority, so that online requests go before them within one round; they never pass
through Serve. What becomes of a shard is `Generate`'s business, as in a job's own actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from ray.exceptions import RayError

from pipelines.desk_actor import DeskPort
from pipelines.engines import Engine
from pipelines.generate import Generate, GenerateSpec
from pipelines.shard_desk import ASK_S, BEAT_S, ServedEngine, ShardKey, ShardOffer
from pipelines.write import Part

# A replica that ends says so, unless nobody listens.
LAST_WORDS_S = 5.0

logger = logging.getLogger(__name__)


class ShardPuller:
    """Takes shards from the desk while `room` says for how many there is slack.

    It has no task until `run` is called; `stop` gives back what is not done.
    """

    def __init__(
        self,
        open_desk: Callable[[], DeskPort],
        replica: str,
        engine: Engine,
        served: ServedEngine,
        room: Callable[[], int],
    ) -> None:
        self._open_desk = open_desk
        self._replica = replica
        self._engine = engine
        self._served = served
        self._room = room
        self._tasks: dict[ShardKey, asyncio.Task[None]] = {}
        self._generates: dict[str, Generate] = {}
        self._runs: Counter[str] = Counter()
        self._wake = asyncio.Event()

    @property
    def num_shards(self) -> int:
        """That are in the engine now."""
        return len(self._tasks)

    def wake(self) -> None:
        """Ask `room` again."""
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled. A desk that is gone is opened anew."""
        while True:
            desk = self._open_desk()
            tasks = [asyncio.create_task(self._beat(desk)), asyncio.create_task(self._take(desk))]
            try:
                await asyncio.gather(*tasks)
            except RayError:
                logger.warning("the desk of batch shards is gone; opening it again", exc_info=True)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(BEAT_S)

    async def stop(self) -> None:
        """Give back what is not done, and say that this replica ends. `run` must have been cancelled."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._open_desk().leave(self._replica), LAST_WORDS_S)

    async def _beat(self, desk: DeskPort) -> None:
        while True:
            for key in await desk.beat(self._replica, self._served, list(self._tasks)):
                if key in self._tasks:
                    self._tasks[key].cancel()
            await asyncio.sleep(BEAT_S)

    async def _take(self, desk: DeskPort) -> None:
        while True:
            self._wake.clear()
            most = self._room() - len(self._tasks)
            if most < 1:
                await self._wake.wait()
                continue
            for offer in await desk.take(self._replica, most, ASK_S):
                if offer.key not in self._tasks:
                    self._tasks[offer.key] = asyncio.create_task(self._do(desk, offer))

    async def _do(self, desk: DeskPort, offer: ShardOffer) -> None:
        """One shard, from its reference to its receipt at the desk."""
        key = offer.key
        self._runs[key.run] += 1
        try:
            spec: GenerateSpec = await offer.spec[0]
            shard = await offer.shard[0]
            generate = self._generates.setdefault(key.run, Generate(spec, lambda _: self._engine))
            try:
                receipt = await generate(shard)
            except asyncio.CancelledError:
                await self._give_back(desk, key, spec)
                raise
            await desk.finish(key, receipt)
        except RayError:
            # The job has ended, or the desk: who still wants the shard offers it again.
            logger.warning("shard %s is dropped", key.shard_id, exc_info=True)
        finally:
            del self._tasks[key]
            self._runs[key.run] -= 1
            if not self._runs[key.run]:
                # With it goes what it remembers of the run; a next shard starts it anew.
                del self._runs[key.run]
                self._generates.pop(key.run, None)
            self.wake()

    async def _give_back(self, desk: DeskPort, key: ShardKey, spec: GenerateSpec) -> None:
        """Nobody is to count it as a death."""
        redo = spec.redos.get(key.shard_id)
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await spec.admission.give_back(redo.part if redo else Part(key.shard_id))
                await desk.give_back(self._replica, [key])
