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

from scripted_steps.session_scripts import Script, SessionScript, script_with_overlap, session_calls


async def play_session(engine: Any, script: SessionScript, place: tuple[int, int], settings: Mapping[str, Any]) -> int:
    """One session, with the sampling that verl's agent loop worker asks for; returns tokens generated.

    Raises:
        ValueError: vLLM generated more or fewer tokens than the script says.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    generated, reply = 0, None
    play = session_calls(script, place, settings["vocab"])
    while True:
        try:
            context, wanted = next(play) if reply is None else play.send(reply)
        except StopIteration:
            return generated
        if reply is not None:
            await asyncio.sleep(settings["tool_seconds"])
        sampling = SamplingParams(max_tokens=wanted, temperature=1.0, logprobs=0, ignore_eos=True)
        name = "-".join(map(str, (*place, generated)))
        async for output in engine.generate(TokensPrompt(prompt_token_ids=context), sampling, name):
            last = output
        reply = list(last.outputs[0].token_ids)
        if len(reply) != wanted:
            raise ValueError(f"the script says {wanted} tokens behind {len(context)}, vLLM wrote {len(reply)}")
        generated += wanted


async def play_rounds(script: Script, settings: Mapping[str, Any], output: Path) -> None:
    """Play all sessions at once, `settings["rounds"]` times, each from an empty prefix cache."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings["engine"]))
    places = [(group, session) for group, of_group in enumerate(script.groups) for session in range(len(of_group))]
    lines = []
    for _ in range(settings["rounds"]):
        await engine.reset_prefix_cache()
        started = time.time()
        sessions = (play_session(engine, script.groups[place[0]][place[1]], place, settings) for place in places)
        generated = sum(await asyncio.gather(*sessions))
        lines.append({"rollout_s": time.time() - started, "generated_tokens": generated})
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine.shutdown()


def main() -> None:
    """Play what the settings say."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(play_rounds(script_with_overlap(**settings["script"]), settings, Path(sys.argv[2])))


if __name__ == "__main__":
    main()
