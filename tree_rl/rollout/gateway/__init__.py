"""A recording gateway: any agent that speaks OpenAI's or Anthropic's protocol, recorded by exact token ids.

`Gateway` lives in `tree_rl.rollout.gateway.gateway` and needs the extra `agents`.
"""
