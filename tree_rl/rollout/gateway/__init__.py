"""Serves a model to agents over OpenAI's, Anthropic's and Google's protocols, and records exact token ids.

`Gateway` lives in `tree_rl.rollout.gateway.gateway` and needs the extra `gateway`.
"""
