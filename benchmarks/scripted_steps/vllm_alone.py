"""The sessions of a script on vLLM alone: its engine in this process's asyncio loop, no verl, no Ray, no gateway.

`python -m scripted_steps.vllm_alone SETTINGS OUTPUT`: both are JSON files, the second receives one line a round.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from scripted_steps.session_scripts import Script, play_session, script_with_overlap, tool_seconds_of


async def play_rounds(script: Script, settings: Mapping[str, Any], output: Path) -> None:
    """Play all sessions at once, `settings["rounds"]` times, each from an empty prefix cache.

    With the sampling that verl's agent loop worker asks for.
    """
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings["engine"]))

    async def ask(context: list[int], wanted: int) -> list[int]:
        sampling = SamplingParams(max_tokens=wanted, temperature=1.0, logprobs=0, ignore_eos=True)
        async for output in engine.generate(TokensPrompt(prompt_token_ids=context), sampling, uuid4().hex):
            last = output
        return list(last.outputs[0].token_ids)

    lines = []
    for played in range(settings["rounds"]):
        wait = tool_seconds_of(played + 1, settings["tool_seconds"], settings["unmeasured"])
        await engine.reset_prefix_cache()
        started = time.time()
        sessions = (
            play_session(one, (group, session), ask, vocab=settings["vocab"], tool_seconds=wait)
            for group, of_group in enumerate(script.groups)
            for session, one in enumerate(of_group)
        )
        await asyncio.gather(*sessions)
        figures = {"rollout_s": time.time() - started, "generated_tokens": script.generated_tokens}
        lines.append({"tool_seconds": wait, **figures})
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine.shutdown()


def main() -> None:
    """Play what the settings say."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(play_rounds(script_with_overlap(**settings["script"]), settings, Path(sys.argv[2])))


if __name__ == "__main__":
    main()
