"""Seeds of requests that depend on the run's seed, the step and the row, not on what the process did before.

A resumed run then repeats the rollouts of the interrupted one. `rollout.name=hf` always has seeds. They cost vLLM
speed: there verl's `rollout.full_determinism=True` switches them on.
"""

from collections import Counter
from typing import Any

from tree_rl.derived_seed import derived_seed


def draws_are_seeded(rollout: Any) -> bool:
    """Whether requests carry seeds."""
    return rollout.name == "hf" or bool(rollout.name == "vllm" and rollout.get("full_determinism", False))


class SeededClient:
    """verl's `LLMServerClient`, giving every call of a session random numbers of its own.

    The n-th call with one prompt gets seed f(session's seed, prompt, n): turns differ, as do sub-agents that ask alike.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._asked: dict[int, Counter[int]] = {}

    def open_session(self, *parts: int | str) -> int:
        """The seed for the sampling parameters of a session that `parts` identify: seed, partition, step, row."""
        seed = derived_seed(*parts)
        self._asked[seed] = Counter()
        return seed

    def close_session(self, seed: int) -> None:
        """Forget a session."""
        self._asked.pop(seed, None)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """verl's call. A seed that belongs to no session passes unchanged."""
        asked = self._asked.get(sampling_params.get("seed", -1))
        if asked is not None:
            prompt_seed = derived_seed(sampling_params["seed"], list(prompt_ids))
            sampling_params = {**sampling_params, "seed": derived_seed(prompt_seed, asked[prompt_seed])}
            asked[prompt_seed] += 1
        return await self._client.generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
