"""The environment in docs/environments.md works as printed."""

import asyncio
import re
from pathlib import Path
from typing import Any

from tree_rl.rollout.environments import Outcome, ToolCall

DOCUMENT = Path(__file__).parents[2] / "docs" / "environments.md"
OUTCOME = Outcome(answer="", turns=1, malformed_calls=0, is_complete=True)


def snippet() -> str:
    found = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def test_it_plays() -> None:
    names: dict[str, Any] = {}
    exec(snippet(), names)

    async def play() -> float:
        environment = names["GuessEnvironment"]()
        await environment.reset({"number": 7})
        (tool,) = environment.tools()

        def guess(**arguments: Any) -> ToolCall:
            return ToolCall(name=tool["function"]["name"], arguments=arguments)

        assert "error" in await environment.call(guess(value=3))
        assert [await environment.call(guess(number=n)) for n in (3, 9, 7)] == ["too low", "too high", "correct"]
        reward = await environment.score(OUTCOME)
        await environment.close()
        return reward

    assert asyncio.run(play()) == 1 / 3
