"""The address and key of an agent's session."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

CALL_TIMEOUT_S = 3600.0
"""A call that takes longer is cancelled and answered with status 504."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address and key of one session."""

    url: str
    """Base address without `/v1`, for Anthropic's and Google's clients."""
    token: str
    """Key of this session, sent as bearer token, `x-api-key` or `x-goog-api-key`."""
    model: str
    """Name of the model. The gateway accepts any name."""
    stop_session: Callable[[], Awaitable[None]] | None = field(default=None, compare=False, repr=False)
    """Function that ends the session; None if another process serves this address."""
    ran_out_of_calls: Callable[[], bool] | None = field(default=None, compare=False, repr=False)
    """Returns True once the gateway refused a call beyond `max_calls`; None if another process serves this address."""

    @property
    def openai_url(self) -> str:
        """Base address with `/v1`, for OpenAI's clients."""
        return f"{self.url}/v1"

    def named(self, agent: str) -> "Endpoint":
        """The same session for a sub-agent, whose name (letters, digits, `.`, `_`, `-`) is recorded with its calls."""
        return replace(self, url=f"{self.url}/a/{agent}")

    async def stop(self) -> None:
        """End the session: the gateway refuses running and later calls with status 403. The record stays."""
        if self.stop_session is not None:
            await self.stop_session()

    def environment(self) -> dict[str, str]:
        """Environment variables that direct a command-line agent to the session and keep its prompts' prefix stable."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self.token,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.token,
            "GOOGLE_GEMINI_BASE_URL": self.url,
            "GEMINI_API_KEY": self.token,
            # Claude Code starts its system prompt with a version and a checksum that differ between calls.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
