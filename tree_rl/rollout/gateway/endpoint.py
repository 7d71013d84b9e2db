"""The address and key of an agent's session."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address and key of one session."""

    url: str
    """Base address without `/v1`, for Anthropic's clients."""
    token: str
    """Key of this session: bearer token or `x-api-key`."""
    model: str
    """Name of the model. The gateway answers under every name."""

    @property
    def openai_url(self) -> str:
        """Base address with `/v1`, for OpenAI's clients."""
        return f"{self.url}/v1"

    def named(self, agent: str) -> "Endpoint":
        """The same session for a sub-agent. Its calls carry its name: letters, digits, `.`, `_` and `-`."""
        return Endpoint(url=f"{self.url}/a/{agent}", token=self.token, model=self.model)

    def environment(self) -> dict[str, str]:
        """Environment variables that point a command-line agent to the session."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self.token,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.token,
        }
