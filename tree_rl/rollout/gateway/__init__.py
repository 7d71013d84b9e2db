"""A recording gateway: any agent that speaks OpenAI's, Anthropic's or Google's protocol, recorded by exact token ids.

`Gateway` lives in `tree_rl.rollout.gateway.gateway` and needs the extra `gateway`.
"""
