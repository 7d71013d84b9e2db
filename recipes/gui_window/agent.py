"""The recipe's agent: it sees the last screenshots alone, so every later click starts a branch."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import openai
from gui_window.screens import ASKED, Screens
from PIL import Image

from tree_rl.rollout.gateway.agent_protocol import AgentResult

WINDOW = 2
"""Screenshots that the model sees."""
CLICKS = 4
"""Clicks of a session."""


class WindowAgent:
    """Plays one session."""

    async def run(
        self, endpoint: Any, *, messages: Sequence[Mapping[str, Any]], task: Mapping[str, Any]
    ) -> AgentResult:
        """Play the screens that the task's `seed` chooses."""
        screens, turns = Screens(task["seed"], CLICKS), list[dict[str, Any]]()
        # Reading certificates for every session would take a quarter of the rollout.
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, http_client=http) as client:
            while not screens.is_over:
                picture = {"type": "image_url", "image_url": {"url": data_url(screens.screenshot())}}
                turns.append({"role": "user", "content": [picture]})
                # The window's screenshots, and what was clicked between them.
                seen = [{"role": "system", "content": ASKED}, *turns[-2 * WINDOW + 1 :]]
                answer = await client.chat.completions.create(model="policy", messages=seen, max_tokens=2)
                said = answer.choices[0].message.content or ""
                screens.click(said)
                turns.append({"role": "assistant", "content": said})
        return AgentResult(reward=screens.score)


def data_url(picture: Image.Image) -> str:
    """A picture as clients of OpenAI's API send it."""
    png = BytesIO()
    picture.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
