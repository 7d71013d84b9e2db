"""Sessions of turns that a tiny model samples."""

import asyncio
from types import SimpleNamespace
from typing import Any

import openai
from gateway_harness import (
    CHATML,
    Agent,
    TinyModel,
    build_tokenizer,
    check_record,
    serving,
)

SAMPLES = 16


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def two_turns_sampled(tiny: SimpleNamespace, on_drift: str, samples: int = SAMPLES) -> list[Any]:
    """Sessions of two sampled turns each; the template writes every turn as it is."""
    backend = TinyModel(tiny.model, build_tokenizer(CHATML))

    async def session(gateway: Any, number: int) -> Any:
        opened = gateway.open_session(sampling={"temperature": 1.0})
        endpoint = gateway.endpoint(opened)
        async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token) as client:
            agent = Agent(client, [user(f"question {number}")], max_tokens=5)
            await agent.step()
            await agent.step(user("more"))
        return await gateway.close_session(opened)

    async def run() -> list[Any]:
        async with serving(backend, backend.tokenizer, on_drift=on_drift, reasoning="inline") as gateway:
            return [await session(gateway, number) for number in range(samples)]

    records = asyncio.run(run())
    for record in records:
        check_record(backend, record)
    return records
