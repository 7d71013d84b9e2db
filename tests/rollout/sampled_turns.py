"""Sessions of turns that a tiny model samples."""

from types import SimpleNamespace
from typing import Any

from gateway_harness import CHATML, TinyModel, build_tokenizer, talking, user

SAMPLES = 16


async def two_turns_sampled(tiny: SimpleNamespace, on_drift: str, samples: int = SAMPLES) -> list[Any]:
    """Sessions of two sampled turns each; the template writes every turn as it is."""
    backend = TinyModel(tiny.model, build_tokenizer(CHATML))
    records = []
    for number in range(samples):
        async with talking(backend, on_drift=on_drift, reasoning="inline") as talk:
            agent = talk.agent(user(f"question {number}"), max_tokens=5)
            await agent.step()
            await agent.step(user("more"))
            records.append(await talk.close())
    return records
