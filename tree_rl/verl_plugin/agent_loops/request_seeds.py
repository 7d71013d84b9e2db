"""Seeds of requests that depend on the run's seed, the step and the row, not on earlier requests of the process.

So a resumed run repeats the rollouts of the interrupted one. `rollout.name=hf` always has seeds. They slow down vLLM,
so there verl's `rollout.full_determinism=True` switches them on.
"""

from collections import Counter
from typing import Any

from tree_rl.derived_seed import derived_seed


def draws_are_seeded(rollout: Any) -> bool:
    """True if requests have seeds."""
    return rollout.name == "hf" or bool(rollout.name == "vllm" and rollout.get("full_determinism", False))


class SeededClient:
    """verl's `LLMServerClient` with a separate seed for every call of a session: f(session's seed, prompt, n) for the
    n-th call with the same prompt."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._asked: dict[int, Counter[int]] = {}

    def open_session(self, *parts: int | str) -> int:
        """The seed of the session that `parts` (seed, partition, step, row) identify, for its sampling parameters."""
        seed = derived_seed(*parts)
        self._asked[seed] = Counter()
        return seed

    def close_session(self, seed: int) -> None:
        self._asked.pop(seed, None)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """verl's call. A seed of no open session stays unchanged."""
        asked = self._asked.get(sampling_params.get("seed", -1))
        if asked is not None:
            prompt_seed = derived_seed(sampling_params["seed"], list(prompt_ids))
            sampling_params = {**sampling_params, "seed": derived_seed(prompt_seed, asked[prompt_seed])}
            asked[prompt_seed] += 1
        return await self._client.generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
