"""Where an agent finds its session."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address and key of one session."""

    url: str
    """Base address without `/v1`, as Anthropic clients want it."""
    token: str
    """Key of this session alone: bearer token or `x-api-key`."""
    model: str
    """Name of the model; any other is served alike."""

    @property
    def openai_url(self) -> str:
        """Base address with `/v1`, as OpenAI clients want it."""
        return f"{self.url}/v1"

    def named(self, agent: str) -> "Endpoint":
        """The same session for a sub-agent, whose calls carry its name.

        Args:
            agent: letters, digits, `.`, `_` and `-`.
        """
        return Endpoint(url=f"{self.url}/a/{agent}", token=self.token, model=self.model)

    def environment(self) -> dict[str, str]:
        """Environment variables that point a command-line agent here."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self.token,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.token,
        }
