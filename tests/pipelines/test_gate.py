"""Together or alone, and never both."""

from __future__ import annotations

import asyncio
import random

from pipelines.gate import Gate


def test_nobody_is_in_with_one_who_is_alone_and_everybody_gets_in():
    async def run(seed: int) -> int:
        gate = Gate()
        generator = random.Random(seed)
        together = alone = done = 0

        async def join(wants_alone: bool) -> None:
            nonlocal together, alone, done
            for _ in range(generator.randrange(4)):
                await asyncio.sleep(0)
            if wants_alone:
                async with gate.alone():
                    alone += 1
                    assert (together, alone) == (0, 1)
                    await asyncio.sleep(0)
                    assert (together, alone) == (0, 1)
                    alone -= 1
            else:
                async with gate.together():
                    together += 1
                    assert alone == 0
                    await asyncio.sleep(0)
                    assert alone == 0
                    together -= 1
            done += 1

        await asyncio.gather(*(join(generator.random() < 0.3) for _ in range(40)))
        return done

    for seed in range(20):
        assert asyncio.run(asyncio.wait_for(run(seed), 10)) == 40


def test_many_are_in_together_and_one_who_waits_to_be_alone_goes_before_those_who_come_later():
    async def run() -> list[str]:
        gate = Gate()
        order: list[str] = []
        first, second = asyncio.Event(), asyncio.Event()

        async def join(name: str, own: asyncio.Event, other: asyncio.Event) -> None:
            async with gate.together():
                own.set()
                await other.wait()
            order.append(name)

        async def alone() -> None:
            async with gate.alone():
                order.append("alone")

        async def late() -> None:
            async with gate.together():
                order.append("late")

        pair = [
            asyncio.create_task(join("a", first, second)),
            asyncio.create_task(join("b", second, asyncio.Event())),
        ]
        await first.wait()
        await second.wait()
        rest = [asyncio.create_task(alone()), asyncio.create_task(late())]
        for _ in range(5):
            await asyncio.sleep(0)
        order.append("nobody yet")
        pair[1].cancel()
        await asyncio.gather(*pair, *rest, return_exceptions=True)
        return order

    assert asyncio.run(asyncio.wait_for(run(), 10)) == ["a", "nobody yet", "alone", "late"]
