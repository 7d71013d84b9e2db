"""verl's agent loop of the recipe: the model sees the last screenshots alone, so every later click starts a branch."""

from typing import Any
from uuid import uuid4

from gui_window.screens import Screens, conversation
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from tree_rl.rollout.transcript import ModelCall
from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend
from tree_rl.verl_plugin.agent_loops.session_images import SessionImages
from tree_rl.verl_plugin.agent_loops.session_outputs import rows_to_outputs

WINDOW = 2
"""Screenshots that the model sees."""
CLICKS = 4
"""Clicks of a session."""


class WindowLoop(AgentLoopBase):
    """Plays one session."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> list[AgentLoopOutput]:
        """Play the screens of a sample.

        Args:
            sampling_params: of every call.
            sample: `extra_info.seed` chooses the screens.
        """
        images = SessionImages(self.processor, self.mm_processor_kwargs)
        end = frozenset({self.tokenizer.eos_token_id})
        backend = VerlBackend(self.server_manager, end_token_ids=end, server=self.rollout_config.name, images=images)
        screens, session = Screens(sample["extra_info"]["seed"], CLICKS), uuid4().hex
        said: list[str] = []
        pictures: list[Any] = []
        calls: list[ModelCall] = []
        while not screens.is_over:
            pictures.append(screens.screenshot())
            text = self.processor.apply_chat_template(
                conversation([*said[-WINDOW + 1 :], None]), tokenize=False, add_generation_prompt=True
            )
            prompt_ids = images.encode(text, pictures[-WINDOW:])
            answer = await backend.generate(prompt_ids, max_tokens=2, sampling=sampling_params, session=session)
            calls.append(
                ModelCall(
                    prompt_ids=tuple(prompt_ids),
                    response_ids=answer.token_ids,
                    log_probs=answer.log_probs,
                    turn=len(calls),
                    min_version=answer.min_version,
                    max_version=answer.max_version,
                )
            )
            said.append(self.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
            screens.click(said[-1])
        return rows_to_outputs(
            tuple(calls), reward=screens.score, figures={}, metrics=AgentLoopMetrics(), images=images
        )
